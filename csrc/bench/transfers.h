// Runs one kind of operation again and again on regions of one or several peers.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "buffer.h"
#include "options.h"
#include "samples.h"

#include "../engine.h"

namespace mr::bench {

constexpr uint64_t kReadSeed = 0x5eed;       // pattern of the owners' memory
constexpr uint64_t kWriteSeed = 0x5eed + 1;  // pattern that is written
constexpr double kOperationTimeout = 60;     // seconds; nothing here may wait for ever

// Waits for an operation, gives it back, and throws Failure unless it went well.
mr_result finish(mr_op* op, const std::string& doing);

struct TransferPlan {
  Op op = Op::kRead;
  uint64_t size = 0;  // bytes of one operation
  Strided strided;
  bool one_by_one = false;  // strided: `pieces` operations instead of one
  uint32_t depth = 1;       // in flight per region
  uint32_t flags = 0;
};

struct Moved {
  uint64_t operations = 0, bytes = 0;
  double seconds = 0;

  double rate() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
};

class Transfers {
 public:
  // Local memory is one slot per operation in flight; for writes it holds the pattern of kWriteSeed.
  Transfers(const std::vector<mr_remote*>& regions, const TransferPlan& plan);
  Transfers(const std::vector<mr_remote*>& regions, const TransferPlan& plan, Buffer local);
  ~Transfers();
  Transfers(const Transfers&) = delete;

  // Promises that the local memory stays, so that a card keeps it registered, as raw programs do with theirs.
  void keep(mr_engine* engine);
  // One operation, and what it says of itself.
  mr_result probe();
  // Blocking operations, one at a time. Appends seconds per operation.
  void latency(const Turn& turn, std::vector<double>& samples);
  // `depth` operations in flight per region, until the turn is over or `stop` is set.
  Moved window(const Turn& turn, const std::atomic<bool>* stop = nullptr);

  uint64_t operations() const { return operations_; }  // completed so far
  uint64_t slots_used() const { return slots_used_; }
  uint8_t* slot(uint64_t index) const { return local_.data() + index * slot_bytes(plan_); }
  // Room for `plan.size` bytes, aligned for 64-bit atomics.
  static uint64_t slot_bytes(const TransferPlan& plan) { return (plan.size + 7) & ~uint64_t{7}; }

 private:
  mr_op* start(uint64_t index, uint64_t piece, bool explains = false);
  void wait(mr_op* op);
  uint64_t steps() const { return plan_.one_by_one ? plan_.strided.pieces : 1; }

  const std::vector<mr_remote*> regions_;
  const TransferPlan plan_;
  Buffer local_;
  uint64_t operations_ = 0, slots_used_ = 0;
  std::vector<mr_op*> flying_;
  mr_error error_{};  // once: as large as it is, clearing it takes as long as a small copy
  mr_engine* keeper_ = nullptr;
};

// The plan's bytes inside the region, and as they lie in local memory (gathered).
uint32_t lane_flags(Lane lane);  // that leave no other lane
mr_view remote_view(const TransferPlan& plan);
mr_view local_view(const TransferPlan& plan);
// Bytes of a region that the plan needs.
uint64_t region_bytes(uint64_t size, const Strided& strided);

}  // namespace mr::bench
