#include "raw_copy.h"

#include <sys/uio.h>

#include <atomic>
#include <cstring>
#include <string>

#include "failure.h"

namespace mr::bench {
namespace {

// Page-aligned share of member `index`.
struct Share {
  uint64_t start, length;
};
Share share_of(uint64_t size, uint32_t index, uint32_t members) {
  uint64_t each = (size / members + 4095) & ~uint64_t{4095};
  uint64_t start = std::min(size, each * index);
  uint64_t end = index + 1 == members ? size : std::min(size, start + each);
  return {start, end - start};
}

// Returns 0 or the errno.
int copy_range(pid_t pid, uint8_t* local, uint64_t remote, uint64_t length, bool write) {
  for (uint64_t done = 0; done < length;) {
    iovec here{local + done, length - done}, there{reinterpret_cast<void*>(remote + done), length - done};
    ssize_t moved =
        write ? process_vm_writev(pid, &here, 1, &there, 1, 0) : process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (moved <= 0) return moved ? errno : EFAULT;
    done += static_cast<uint64_t>(moved);
  }
  return 0;
}

}  // namespace

Team::Team(uint32_t size) : size_(size), gate_(size) {
  for (uint32_t index = 1; index < size; ++index)
    threads_.emplace_back([this, index] {
      for (;;) {
        gate_.arrive_and_wait();
        if (!work_) return;
        (*work_)(index);
        gate_.arrive_and_wait();
      }
    });
}

Team::~Team() {
  work_ = nullptr;
  gate_.arrive_and_wait();
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(uint32_t)>& work) {
  if (size_ == 1) return work(0);
  work_ = &work;
  gate_.arrive_and_wait();
  work(0);
  gate_.arrive_and_wait();
}

RawMemcpy::RawMemcpy(uint64_t size, uint32_t threads)
    : team_(threads), from_(Buffer::touched(size)), to_(Buffer::touched(size)) {}

void RawMemcpy::copy() {
  team_.run([this](uint32_t index) {
    Share share = share_of(to_.size(), index, team_.size());
    std::memcpy(to_.data() + share.start, from_.data() + share.start, share.length);
  });
}

RawProcessVm::RawProcessVm(pid_t pid, uint64_t address, uint64_t size, bool write, uint32_t threads)
    : pid_(pid), address_(address), write_(write), team_(threads), local_(Buffer::touched(size)) {}

void RawProcessVm::copy() {
  std::atomic<int> failed{0};
  team_.run([&](uint32_t index) {
    Share share = share_of(local_.size(), index, team_.size());
    int error = copy_range(pid_, local_.data() + share.start, address_ + share.start, share.length, write_);
    if (error) failed = error;
  });
  if (failed) throw Failure(std::string("process_vm_readv/writev: ") + std::strerror(failed));
}

}  // namespace mr::bench
