// Named counters that any thread raises without a lock. Names are string literals.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace mr {

class Counters {
 public:
  void add(const char* name, uint64_t amount) {
    const size_t start = (reinterpret_cast<uintptr_t>(name) >> 3) % kSlots;
    for (size_t i = 0; i < kSlots; ++i) {
      Slot& slot = slots_[(start + i) % kSlots];
      const char* seen = slot.name.load(std::memory_order_acquire);
      if (seen == nullptr && slot.name.compare_exchange_strong(seen, name, std::memory_order_acq_rel)) seen = name;
      if (seen == name) {
        slot.value.fetch_add(amount, std::memory_order_relaxed);
        return;
      }
    }
  }
  // One name may stand in several slots: literals of different files.
  std::map<std::string, uint64_t> read() const {
    std::map<std::string, uint64_t> out;
    for (const Slot& slot : slots_)
      if (const char* name = slot.name.load(std::memory_order_acquire))
        out[name] += slot.value.load(std::memory_order_relaxed);
    return out;
  }

 private:
  static constexpr size_t kSlots = 256;
  struct Slot {
    std::atomic<const char*> name{nullptr};
    std::atomic<uint64_t> value{0};
  };
  Slot slots_[kSlots];
};

}  // namespace mr
