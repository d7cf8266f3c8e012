// What this process used: processor time, context switches, peak memory.
#pragma once

#include <cstdint>

namespace mr::bench {

// Of all threads but the calling one: an engine's own threads, while the caller sleeps.
struct IdleUsage {
  double cpu_seconds = 0;
  uint64_t context_switches = 0;
};
// Sleeps `seconds` and returns what the other threads used meanwhile.
IdleUsage measure_idle(double seconds);

// Peak resident memory between start() and extra().
class PeakMemory {
 public:
  void start();
  // Bytes above the start; pages of shared buffers that were mapped meanwhile are in peak, not in extra.
  struct Growth {
    uint64_t peak = 0;
    uint64_t extra = 0;
  };
  Growth stop() const;

 private:
  uint64_t resident_ = 0;
  uint64_t shared_ = 0;
};

// Bytes that the host can give without swapping.
uint64_t available_memory();

}  // namespace mr::bench
