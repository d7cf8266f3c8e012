#include "arena.h"

namespace mr {
namespace {

constexpr uint64_t kPage = 4096;

uint64_t whole_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

static_assert(sizeof(ArenaHead) <= kPage && sizeof(PieceHead) == 64);

uint64_t Geometry::slots() const { return kPage; }

uint64_t Geometry::channel(uint32_t from, Traffic traffic) const {
  uint64_t before = 0, of_one = 0;
  for (uint32_t each = kStaged; each < kNumTraffic; ++each) {
    const uint64_t bytes = whole_pages(sizeof(ChannelHead) + kChannelSlots * channel_slot(static_cast<Traffic>(each)));
    if (each < traffic) before += bytes;
    of_one += bytes;
  }
  return slots() + whole_pages(kStagedSteps * slot_bytes) + from * of_one + before;
}

}  // namespace mr
