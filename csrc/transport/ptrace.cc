#include "ptrace.h"

#include <sys/prctl.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <string>

#include "../base/per_process.h"

namespace mr {
namespace {

struct Tracers {
  std::mutex lock;
  std::vector<int> pids;  // of peers, first come first; -1: any process

  // Where there is no Yama the kernel refuses, and nothing needs to be allowed.
  void tell_kernel_locked() const {
    const bool any = std::find(pids.begin(), pids.end(), -1) != pids.end();
    ::prctl(PR_SET_PTRACER, any ? PR_SET_PTRACER_ANY : static_cast<unsigned long>(tracer_for(pids, parent_of)), 0, 0,
            0);
  }
};

// From the process itself upwards.
std::vector<int> line_of(int pid, const std::function<int(int)>& parent) {
  std::vector<int> line;
  for (; pid > 1; pid = parent(pid)) line.push_back(pid);
  return line;
}

}  // namespace

int tracer_for(const std::vector<int>& peers, const std::function<int(int)>& parent) {
  std::vector<int> line;  // the process named so far, and what is above it
  for (const int peer : peers) {
    const auto its = line_of(peer, parent);
    const auto meets = [&](int above) { return std::find(its.begin(), its.end(), above) != its.end(); };
    if (line.empty())
      line = its;
    else if (const auto common = std::find_if(line.begin(), line.end(), meets); common != line.end())
      line.erase(line.begin(), common);
  }
  return line.empty() ? 0 : line.front();
}

int parent_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');  // the name may hold anything
  if (name_end == text.npos || name_end + 4 > text.size()) return 0;
  return std::atoi(text.c_str() + name_end + 4);
}

MayTrace::MayTrace(int pid) : pid_(pid) {
  auto& tracers = of_this_process<Tracers>();
  std::lock_guard guard(tracers.lock);
  tracers.pids.push_back(pid_);
  tracers.tell_kernel_locked();
}

MayTrace::~MayTrace() {
  auto& tracers = of_this_process<Tracers>();
  std::lock_guard guard(tracers.lock);
  const auto found = std::find(tracers.pids.begin(), tracers.pids.end(), pid_);
  if (found == tracers.pids.end()) return;  // of the parent of this forked child
  tracers.pids.erase(found);
  tracers.tell_kernel_locked();
}

}  // namespace mr
