// How a process sleeps until another one, or a thread of its own, has something for it: a futex in shared memory.
#pragma once

#include <atomic>
#include <cstdint>

#include "../base/loop.h"

namespace mr {

struct alignas(64) Bell {
  std::atomic<uint32_t> rung;  // how often; what sleepers sleep on

  void ring();
  // Sleeps until it is rung after `seen` was read from `rung`, or `until`; may wake up early. False: for a signal.
  bool sleep(uint32_t seen, Time until);
};

// How long a waiter looks again and again before it sleeps: where every member has a processor, what it waits for comes
// sooner than a sleeper could be woken. Where that turns out to be in vain it gets shorter, so that it keeps nobody
// from running; where it helps it gets longer again.
class Spinning {
 public:
  explicit Spinning(uint32_t most) : most_(most), now_(most) {}

  // False: go to sleep.
  template <typename Ready>
  bool until(Ready&& ready) {
    const uint32_t rounds = now_.load(std::memory_order_relaxed);
    for (uint32_t i = 0; i < rounds; ++i) {
      if (ready()) {
        now_.store(std::min(most_, 2 * rounds), std::memory_order_relaxed);
        return true;
      }
      pause();
    }
    if (ready()) return true;
    now_.store(std::min(most_, std::max(kLeast, rounds / 2)), std::memory_order_relaxed);
    return false;
  }

 private:
  static constexpr uint32_t kLeast = 64;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const uint32_t most_;
  std::atomic<uint32_t> now_;
};

}  // namespace mr
