// Keys of the peer's regions at its cards, as its owner told them: a book for the loop, and a small cache that any
// thread reads without a lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <unordered_set>
#include <vector>

#include "verbs_transfer.h"

namespace mr {

// On the loop.
class VerbsKeyBook {
 public:
  struct Entry {
    RegionName name;
    uint32_t rail = 0;   // theirs
    bool known = false;  // else asked for
    uint64_t number = 0;
    VerbsKeys keys;
    std::unordered_set<VerbsTransferRef> waiting;
  };

  Entry* find(const RegionName& name, uint32_t rail);
  Entry& ask(const RegionName& name, uint32_t rail);
  Entry* asked(uint64_t number);
  void forget(uint64_t region);  // unless it is being asked for
  void erase(const Entry& entry);
  std::vector<VerbsTransferRef> all_waiting();

 private:
  using Place = std::pair<uint64_t, uint32_t>;  // region id, rail

  uint64_t next_number_ = 1;
  std::map<Place, Entry> entries_;
  std::map<uint64_t, Place> by_number_;
};

// Keys of regions that need one key. A key that is no longer valid is found out by the card.
class VerbsKeyCache {
 public:
  struct Found {
    uint64_t base, size;
    uint32_t rkey;
    bool atomics;
  };

  // Any thread; false where it is not here.
  bool find(const RegionName& name, uint32_t rail, Found* out) const;
  // On the loop.
  void put(const RegionName& name, uint32_t rail, const VerbsKeys& keys);
  void forget(uint64_t region);

 private:
  static constexpr size_t kEntries = 128;
  struct Entry {
    std::atomic<uint32_t> version{0};  // odd: being written
    std::atomic<uint64_t> region{0}, key[2], base{0}, size{0};
    std::atomic<uint32_t> rail{0}, rkey{0};
    std::atomic<bool> atomics{false};
  };
  static size_t index(uint64_t region, uint32_t rail) { return (region * 31 + rail) % kEntries; }

  Entry entries_[kEntries];
};

}  // namespace mr
