#include "exposure.h"

namespace mr {

Exposure::Exposure(Node& node, ArenaHead& head, const void* at, uint64_t bytes) : node_(node) {
  if (bytes < kExposedBytes) return;
  const auto shared = node_.regions().shared_at(at, bytes);
  if (!shared) return;
  region_ = node_.regions().create(shared->mapping.address(), shared->mapping.size(), MR_READ);
  head.exposed = {region_->id,
                  {region_->key.word[0], region_->key.word[1]},
                  reinterpret_cast<uintptr_t>(region_->base),
                  region_->size,
                  shared->id,
                  region_->slot};
}

// Those who have it mapped are done, or the group has failed, which they notice after each piece.
Exposure::~Exposure() {
  if (!region_) return;
  if (const RegionRef ended = node_.regions().end_access(region_->id)) node_.regions().release(ended);
}

uint64_t Exposure::place_of(const void* at, uint64_t bytes) const {
  if (!region_) return 0;
  const uint64_t offset = reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(region_->base);
  return offset <= region_->size && bytes <= region_->size - offset ? 1 + offset : 0;
}

RemoteRegion Exposed::handle(const RemoteRegion& arena, const ExposedMemory& now) {
  RemoteRegion out = arena;
  out.name = {now.region_id, {{now.key[0], now.key[1]}}};
  out.size = now.size;
  out.access = MR_READ;
  out.base = now.base;
  out.slot = static_cast<uint32_t>(now.slot % kBoardSlots);
  out.shared_id = now.shared_id;
  out.shared_offset = 0;
  return out;
}

std::shared_ptr<Mapping> Exposed::known(uint64_t shared_id) {
  const auto found = known_.find(shared_id);
  if (found == known_.end()) return nullptr;
  auto mapping = found->second.lock();
  if (!mapping) known_.erase(found);
  return mapping;
}

void Exposed::set(const ExposedMemory& now, std::shared_ptr<Mapping> mapping) {
  if (now.size > mapping->size())
    throw Error(MR_PROTOCOL, "exposed memory of " + std::to_string(now.size) + " bytes, of which " +
                                 std::to_string(mapping->size()) + " are mapped");
  known_[now.shared_id] = mapping;
  mapping_ = std::move(mapping);
  region_id_ = now.region_id;
  size_ = now.size;
}

const uint8_t* Exposed::find(uint64_t place, uint64_t bytes) const {
  const uint64_t offset = place - 1;
  return offset <= size_ && bytes <= size_ - offset ? mapping_->address() + offset : nullptr;
}

}  // namespace mr
