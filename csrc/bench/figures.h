// The figures: what is measured, against what, and the rows that come out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"
#include "raw_peer.h"
#include "session.h"

namespace mr::bench {

// A raw mechanism measured in the same run. ratio = ours / its: above 1 is faster for bandwidth, slower for latency.
struct Against {
  std::string name;
  double value = 0;  // median seconds or bytes per second
  double ratio = 0;
};

struct Row {
  std::string lane, op, figure;
  uint64_t bytes = 0;
  Strided strided;
  uint32_t depth = 1, rails = 0;
  size_t peers = 1;
  bool bidirectional = false;
  double p50 = 0, p99 = 0, p999 = 0;  // latency, seconds
  double bandwidth = 0;               // bytes per second, median
  std::vector<Against> against;
};

// `raw` may be nullptr where no socket baseline is wanted. size is ignored for a strided transfer.
std::vector<Row> measure_transfers(Session& session, Lane lane, Op op, uint64_t size, const Options& options,
                                   RawPeer* raw);
std::vector<Row> measure_messages(Session& session, uint64_t size, const Options& options, RawPeer* raw);

struct IdleRow {
  std::string side;
  double seconds = 0, cpu_seconds = 0;
  uint64_t context_switches = 0;
};
std::vector<IdleRow> measure_idle_engines(Session& session, double seconds);

struct MemoryRow {
  std::string lane, op;
  uint64_t bytes = 0;
  uint64_t extra_here = 0, peak_here = 0, extra_owner = 0, peak_owner = 0;
  double seconds = 0;
};
MemoryRow measure_memory(Session& session, Lane lane, Op op, uint64_t size);

}  // namespace mr::bench
