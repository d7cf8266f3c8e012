// The peer's shared memories that are mapped here. A read-only and a writable mapping of one memory are two: a region
// without the right to write is reached through the read-only one.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "../memory/region.h"

namespace mr {

class ShmMappings {
 public:
  struct Mapped {
    std::shared_ptr<Mapping> mapping;  // null: not mapped
    uint64_t owner_address = 0;        // of the same bytes in the owner's process
  };
  struct Key {
    uint64_t shared_id;
    bool writable;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const { return key.shared_id << 1 | key.writable; }
  };

  static Key key_of(const RemoteRegion& remote) { return {remote.shared_id, (remote.access & MR_WRITE) != 0}; }

  Mapped find(const Key& key) const {
    std::shared_lock guard(lock_);
    const auto found = mapped_.find(key);
    return found == mapped_.end() ? Mapped{} : found->second;
  }
  void add(const Key& key, Mapped mapped) {
    std::unique_lock guard(lock_);
    mapped_[key] = std::move(mapped);
  }
  // Copies in flight keep theirs until they end.
  void remove(uint64_t shared_id) {
    Mapped read_only, writable;  // unmapped outside the lock
    std::unique_lock guard(lock_);
    for (auto [key, out] : {std::pair{Key{shared_id, false}, &read_only}, std::pair{Key{shared_id, true}, &writable}})
      if (auto node = mapped_.extract(key); !node.empty()) *out = std::move(node.mapped());
  }

 private:
  mutable std::shared_mutex lock_;
  std::unordered_map<Key, Mapped, Hash> mapped_;
};

}  // namespace mr
