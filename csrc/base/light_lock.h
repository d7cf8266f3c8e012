// A lock of four bytes for sections of a few instructions: taking and trying it is one atomic exchange and no call.
#pragma once

#include <atomic>
#include <cstdint>

namespace mr {

// Meets Lockable, so that std::unique_lock and std::lock_guard work with it.
class LightLock {
 public:
  bool try_lock() {
    uint32_t free = kFree;
    return state_.compare_exchange_strong(free, kHeld, std::memory_order_acquire);
  }
  void lock() {
    if (try_lock()) return;
    while (state_.exchange(kAwaited, std::memory_order_acquire) != kFree) state_.wait(kAwaited);
  }
  void unlock() {
    if (state_.exchange(kFree, std::memory_order_release) == kAwaited) state_.notify_one();
  }

 private:
  enum State : uint32_t { kFree, kHeld, kAwaited };  // kAwaited: held, and a thread may sleep for it
  std::atomic<uint32_t> state_{kFree};
};

}  // namespace mr
