// Named counters that any thread raises without a lock. Names are string literals. One whose name ends in _read_bytes,
// _write_bytes or _message_bytes tells how often too: shm_read_bytes and shm_reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

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
        slot.times.fetch_add(1, std::memory_order_relaxed);
        return;
      }
    }
  }
  // One name may stand in several slots: literals of different files.
  std::map<std::string, uint64_t> read() const {
    std::map<std::string, uint64_t> out;
    for (const Slot& slot : slots_)
      if (const char* name = slot.name.load(std::memory_order_acquire)) {
        out[name] += slot.value.load(std::memory_order_relaxed);
        if (const std::string times = name_of_times(name); !times.empty())
          out[times] += slot.times.load(std::memory_order_relaxed);
      }
    return out;
  }

 private:
  static std::string name_of_times(std::string_view name) {
    constexpr std::string_view kBytes = "_bytes";
    for (const std::string_view what : {"_read", "_write", "_message"})
      if (name.ends_with(std::string(what) + std::string(kBytes)))
        return std::string(name.substr(0, name.size() - kBytes.size())) + "s";
    return {};
  }

  static constexpr size_t kSlots = 256;
  struct alignas(32) Slot {  // within one cache line
    std::atomic<const char*> name{nullptr};
    std::atomic<uint64_t> value{0}, times{0};
  };
  Slot slots_[kSlots];
};

}  // namespace mr
