// Who may read this process's memory where the kernel's Yama module allows only what is above a process in the tree
// (kernel.yama.ptrace_scope = 1): it lets a process name one other, which may then, and all that descend from it.
#pragma once

#include <functional>
#include <vector>

namespace mr {

// The process to name, so that it or what descends from it are as many of `peers` (pids, first come first) as can be
// without naming the root of all; 0 for none. `parent` gives a process's parent, 0 where there is none.
int tracer_for(const std::vector<int>& peers, const std::function<int(int)>& parent);
int parent_of(int pid);  // from /proc

// While it lives, this process may be traced: by a peer, or (pid < 0) by any process of this user.
class MayTrace {
 public:
  explicit MayTrace(int pid);
  ~MayTrace();
  MayTrace(const MayTrace&) = delete;
  MayTrace& operator=(const MayTrace&) = delete;

 private:
  const int pid_;
};

}  // namespace mr
