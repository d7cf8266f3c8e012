// What a peer on this host lets us see of its memory without asking: its board of regions, read-only.
#pragma once

#include <memory>

#include "../memory/region.h"
#include "process_life.h"

namespace mr {

// Maps a descriptor that came from a peer. MR_REGISTRATION where it could be cut under our hands (that would end this
// process with SIGBUS), or has fewer than min_size bytes. The whole memory is mapped.
std::unique_ptr<Mapping> map_foreign(const Fd& fd, uint64_t min_size, bool writable, const char* what);

// A large mapping that is unmapped by a thread of its own: where its owner has died the last unmap frees the pages,
// which takes half a second a GiB, and whoever lets go of it (the loop, as a rule) must not stand still so long.
std::shared_ptr<Mapping> unmapped_elsewhere(std::unique_ptr<Mapping> mapping);

class PeerBoard {
 public:
  explicit PeerBoard(std::unique_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {}

  // With an entry in the ledger, which keeps the slot from being used again: is this the region of the handle, alive,
  // with `right` granted? Then the handle's base, size and rights are the owner's.
  Status admit(const RemoteRegion& remote, uint32_t right) const;
  // The owner's signs, as the offer says where on the board they are; throws MR_PROTOCOL where that can't be.
  OwnerSigns signs(uint32_t line, uint64_t link_word, uint64_t life_offset, uint32_t life_word) const;
  bool live(const RemoteRegion& remote) const { return slot(remote).live_id.load() == remote.name.id; }

 private:
  const BoardSlot& slot(const RemoteRegion& remote) const { return line(remote.slot); }
  const BoardSlot& line(uint32_t index) const { return reinterpret_cast<const BoardSlot*>(mapping_->address())[index]; }

  const std::unique_ptr<Mapping> mapping_;
};

}  // namespace mr
