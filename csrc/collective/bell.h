// How a process sleeps until another one, or a thread of its own, has something for it: a futex in shared memory.
#pragma once

#include <atomic>
#include <cstdint>

#include "../base/loop.h"

namespace mr {

struct alignas(64) Bell {
  std::atomic<uint32_t> rung;  // how often; what sleepers sleep on

  void ring();
  // Sleeps until it is rung after `seen` was read from `rung`, or `until`; may wake up early.
  void sleep(uint32_t seen, Time until);
};

// How long a waiter looks again and again before it sleeps: where every member has a processor, what it waits for comes
// sooner than a sleeper could be woken. Elsewhere it would keep the one from running that it waits for.
class Spin {
 public:
  explicit Spin(uint32_t rounds) : left_(rounds) {}
  // False: go to sleep.
  bool again() {
    if (left_ == 0) return false;
    --left_;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
    return true;
  }

 private:
  uint32_t left_;
};

}  // namespace mr
