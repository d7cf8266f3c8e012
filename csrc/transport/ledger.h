// Our page of a ledger: where this process writes down the region it is about to touch by itself, so that a drop of
// that region waits. See LedgerEntry. Lock-free; any thread.
#pragma once

#include <utility>

#include "../memory/region.h"

namespace mr {

constexpr uint64_t kLedgerBytes = kLedgerEntries * sizeof(LedgerEntry);

inline bool ledger_names(const LedgerEntry* entries, uint64_t region_id) {
  for (uint32_t i = 0; i < kLedgerEntries; ++i)
    if (entries[i].region_id.load(std::memory_order_seq_cst) == region_id) return true;
  return false;
}

// One entry held; wiped at the end.
class LedgerClaim {
 public:
  LedgerClaim() = default;
  explicit LedgerClaim(LedgerEntry* entry) : entry_(entry) {}
  LedgerClaim(LedgerClaim&& other) noexcept : entry_(std::exchange(other.entry_, nullptr)) {}
  LedgerClaim& operator=(LedgerClaim&& other) noexcept {
    if (this != &other) {
      wipe();
      entry_ = std::exchange(other.entry_, nullptr);
    }
    return *this;
  }
  ~LedgerClaim() { wipe(); }

  explicit operator bool() const { return entry_ != nullptr; }
  void wipe() {
    if (entry_ != nullptr) std::exchange(entry_, nullptr)->region_id.store(0, std::memory_order_release);
  }

 private:
  LedgerEntry* entry_ = nullptr;
};

class Ledger {
 public:
  explicit Ledger(LedgerEntry* entries) : entries_(entries) {}  // kLedgerEntries of them, zeroed

  // An empty claim where all entries are taken. Comes before any look at the region's state: either the owner sees the
  // entry or we see that the region is gone (both sides are sequentially consistent).
  LedgerClaim claim(uint64_t region_id) {
    for (uint32_t i = 0; i < kLedgerEntries; ++i) {
      auto& word = entries_[(first_entry() + i) % kLedgerEntries].region_id;
      uint64_t free = 0;
      if (word.load(std::memory_order_relaxed) == 0 &&
          word.compare_exchange_strong(free, region_id, std::memory_order_seq_cst))
        return LedgerClaim(&entries_[(first_entry() + i) % kLedgerEntries]);
    }
    return {};
  }
  bool names(uint64_t region_id) const { return ledger_names(entries_, region_id); }

 private:
  // Threads begin at different entries, so that they do not fight for one cache line.
  static uint32_t first_entry() {
    static std::atomic<uint32_t> threads{0};
    thread_local uint32_t mine = 0;
    if (mine == 0) mine = threads.fetch_add(1, std::memory_order_relaxed) % kLedgerEntries + kLedgerEntries;
    return mine;
  }

  LedgerEntry* const entries_;
};

}  // namespace mr
