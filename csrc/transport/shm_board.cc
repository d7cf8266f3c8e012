#include "shm_board.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <system_error>
#include <thread>

namespace mr {

std::unique_ptr<Mapping> map_foreign(const Fd& fd, uint64_t min_size, bool writable, const char* what) {
  const std::string subject = std::string("the peer's ") + what;
  if (!fd.valid()) throw Error(MR_REGISTRATION, subject + " came without its descriptor (raise `ulimit -n`)");
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw Error(MR_REGISTRATION, subject + " is not sealed against shrinking, so it is not mapped");
  struct stat about{};
  if (::fstat(fd.get(), &about) != 0) throw Error(MR_REGISTRATION, "can't look at " + subject, errno);
  const auto size = static_cast<uint64_t>(about.st_size);
  if (size < min_size || size == 0)
    throw Error(MR_REGISTRATION, subject + " has " + std::to_string(size) + " bytes, at least " +
                                     std::to_string(std::max<uint64_t>(min_size, 1)) + " are needed");
  return std::make_unique<Mapping>(fd.get(), size, writable);
}

std::shared_ptr<Mapping> unmapped_elsewhere(std::unique_ptr<Mapping> mapping) {
  constexpr uint64_t kQuick = 32u << 20;
  if (mapping->size() <= kQuick) return mapping;
  return {mapping.release(), [](Mapping* gone) {
            try {
              std::thread([gone] { delete gone; }).detach();
            } catch (const std::system_error&) {
              delete gone;
            }
          }};
}

OwnerSigns PeerBoard::signs(uint32_t line_index, uint64_t link_word, uint64_t life_offset, uint32_t life_word) const {
  if (line_index >= kBoardSlots || life_offset % sizeof(life_word) != 0 ||
      life_offset > mapping_->size() - sizeof(life_word))
    throw Error(MR_PROTOCOL, "an offer whose signs are not on its board");
  const auto* const life = reinterpret_cast<const std::atomic<uint32_t>*>(mapping_->address() + life_offset);
  return {&line(line_index).live_id, link_word, life, life_word};
}

Status PeerBoard::admit(const RemoteRegion& remote, uint32_t right) const {
  if (remote.slot >= kBoardSlots) return fail(MR_ACCESS_DENIED, "the handle's slot is not on the owner's board");
  const BoardSlot& line = slot(remote);
  if (line.live_id.load() != remote.name.id) return fail(MR_ACCESS_DENIED, "the region was dropped or never granted");
  const Key key{{line.key[0].load(), line.key[1].load()}};
  if (!key.equals_constant_time(remote.name.key))
    return fail(MR_ACCESS_DENIED, "the region was dropped or never granted");
  if ((line.access.load() & right) != right)
    return fail(MR_ACCESS_DENIED, right == MR_READ    ? "the region does not grant read"
                                  : right == MR_WRITE ? "the region does not grant write"
                                                      : "the region does not grant read and write");
  if (line.base.load() != remote.base || line.size.load() != remote.size)
    return fail(MR_ACCESS_DENIED, "the handle's range is not the region's");
  return {};
}

}  // namespace mr
