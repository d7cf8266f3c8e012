#include "usage.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "failure.h"

namespace mr::bench {
namespace {

double seconds_of(const rusage& usage) {
  auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

IdleUsage other_threads() {
  rusage process, self;
  getrusage(RUSAGE_SELF, &process);
  getrusage(RUSAGE_THREAD, &self);
  return {seconds_of(process) - seconds_of(self),
          static_cast<uint64_t>(process.ru_nvcsw + process.ru_nivcsw - self.ru_nvcsw - self.ru_nivcsw)};
}

uint64_t kilobytes_line(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string word; file >> word;)
    if (word == key + ":") {
      uint64_t kilobytes = 0;
      if (file >> kilobytes) return kilobytes << 10;
    }
  throw Failure("no " + key + " in " + path);
}

uint64_t status_line(const char* key) { return kilobytes_line("/proc/self/status", key); }

uint64_t above(uint64_t value, uint64_t start) { return value > start ? value - start : 0; }

}  // namespace

IdleUsage measure_idle(double seconds) {
  IdleUsage before = other_threads();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  IdleUsage after = other_threads();
  return {std::max(0.0, after.cpu_seconds - before.cpu_seconds), after.context_switches - before.context_switches};
}

void PeakMemory::start() {
  std::ofstream reset("/proc/self/clear_refs");
  reset << "5" << std::flush;  // VmHWM starts again at VmRSS
  if (!reset) throw Failure("cannot reset the peak of resident memory in /proc/self/clear_refs");
  resident_ = status_line("VmRSS");
  shared_ = status_line("RssShmem");
}

PeakMemory::Growth PeakMemory::stop() const {
  uint64_t peak = above(status_line("VmHWM"), resident_);
  return {peak, above(peak, above(status_line("RssShmem"), shared_))};
}

uint64_t available_memory() { return kilobytes_line("/proc/meminfo", "MemAvailable"); }

}  // namespace mr::bench
