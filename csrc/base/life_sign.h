// Whether a process lives, as a word in memory that others have mapped. The kernel itself changes the word when the
// thread that gave the sign ends: so at every end of its process, by SIGKILL and by exec too, and before anybody else
// can have the process's id. It is a robust lock, of which the kernel does this for the next who wants it; here nobody
// does. To look costs a load.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mr {

class LifeSign {
 public:
  static constexpr size_t kBytes = 64;

  // `place`: kBytes of shared memory, zeroed, mapped until the thread that gives the sign has ended.
  explicit LifeSign(void* place) : place_(static_cast<uint8_t*>(place)) {}

  void give();  // once
  // What others see at place + offset() as long as the thread lives; 0: not given, or the kernel does not watch.
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  uint32_t offset() const { return offset_; }

 private:
  uint8_t* const place_;
  uint32_t offset_ = 0;
  std::atomic<uint32_t> value_{0};
};

}  // namespace mr
