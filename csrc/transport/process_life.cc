#include "process_life.h"

#include <fcntl.h>
#include <unistd.h>

#include <string>

namespace mr {

ProcessLife::ProcessLife(int pid) : pidfd_(open_pidfd(pid)) {
  if (pidfd_.valid()) statm_ = Fd(::open(("/proc/" + std::to_string(pid) + "/statm").c_str(), O_RDONLY | O_CLOEXEC));
}

bool ProcessLife::has_memory() const {
  if (!statm_.valid()) return true;
  char first = 0;
  return ::pread(statm_.get(), &first, 1, 0) == 1 && first != '0';  // a killed process has "0 0 0 ...", later ESRCH
}

}  // namespace mr
