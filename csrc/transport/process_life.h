// Whether a process on this host lives. Its pidfd tells when it is over, which for one with much memory comes late: the
// kernel frees the memory first. So it is asked whether it still has memory at all.
#pragma once

#include <atomic>

#include "../base/fd.h"

namespace mr {

// What its owner shows in memory that we have mapped: that its process lives, and that it has not closed the link. Ends
// before the process's id or memory can be somebody else's.
struct OwnerSigns {
  const std::atomic<uint64_t>* link = nullptr;
  uint64_t link_word = 0;
  const std::atomic<uint32_t>* life = nullptr;
  uint32_t life_word = 0;  // 0: its kernel does not tell

  bool are_up() const {
    return (life_word == 0 || life->load(std::memory_order_acquire) == life_word) &&
           link->load(std::memory_order_acquire) == link_word;
  }
};

class ProcessLife {
 public:
  ProcessLife() = default;
  explicit ProcessLife(int pid);  // 0: unknown

  bool is_known() const { return pidfd_.valid(); }
  int pidfd() const { return pidfd_.get(); }  // readable once the process is over
  // False once it has lost its memory, or is over. Any thread; costs about a microsecond.
  bool has_memory() const;

 private:
  Fd pidfd_, statm_;
};

}  // namespace mr
