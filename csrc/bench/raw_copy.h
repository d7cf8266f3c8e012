// The raw same-host mechanisms that the shm lane is compared with: libc memcpy and process_vm_readv/writev.
#pragma once

#include <sys/types.h>

#include <barrier>
#include <functional>
#include <thread>
#include <vector>

#include "buffer.h"

namespace mr::bench {

// `size` threads that do a share of the work each; the caller is one of them.
class Team {
 public:
  explicit Team(uint32_t size);
  ~Team();
  Team(const Team&) = delete;
  // Runs work(index) on every member and returns when all are done.
  void run(const std::function<void(uint32_t)>& work);
  uint32_t size() const { return size_; }

 private:
  const uint32_t size_;
  std::barrier<> gate_;
  const std::function<void(uint32_t)>* work_ = nullptr;  // nullptr at the gate: end
  std::vector<std::thread> threads_;
};

// One copy of `size` bytes between two buffers of this process.
class RawMemcpy {
 public:
  RawMemcpy(uint64_t size, uint32_t threads);
  void copy();

 private:
  Team team_;
  Buffer from_, to_;
};

// One copy of `size` bytes between a buffer of this process and an address in another.
class RawProcessVm {
 public:
  RawProcessVm(pid_t pid, uint64_t address, uint64_t size, bool write, uint32_t threads);
  // Throws Failure where the kernel refuses.
  void copy();

 private:
  const pid_t pid_;
  const uint64_t address_;
  const bool write_;
  Team team_;
  Buffer local_;
};

}  // namespace mr::bench
