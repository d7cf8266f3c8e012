// A fence that the thread sanitizer's builds have too.
#pragma once

#include <atomic>

namespace mr {

// What was read before, also by the kernel for us, was read before whatever is read after.
inline void fence_reads() {
#ifdef __SANITIZE_THREAD__
  // It knows no fences; an update of any word is one to the processor.
  static thread_local std::atomic<int> word{0};
  word.fetch_add(0, std::memory_order_acq_rel);
#else
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace mr
