// Whether a process on this host lives. Its pidfd tells when it is over, which for one with much memory comes late: the
// kernel frees the memory first. So it is asked whether it still has memory at all.
#pragma once

#include "../base/fd.h"

namespace mr {

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
