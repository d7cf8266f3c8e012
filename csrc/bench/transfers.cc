#include "transfers.h"

#include <algorithm>

#include "failure.h"

namespace mr::bench {

mr_result finish(mr_op* op, const std::string& doing) {
  mr_result result{};
  if (!mr_op_wait(op, 2 * kOperationTimeout)) {
    mr_op_cancel(op);
    mr_op_wait(op, -1);
    mr_op_release(op);
    throw Failure(doing + ": not done after " + std::to_string(2 * kOperationTimeout) + " s");
  }
  int kind = mr_op_result(op, &result);
  mr_op_release(op);
  if (kind != MR_OK) throw Failure(doing + ": " + result.message);
  return result;
}

uint32_t lane_flags(Lane lane) {
  switch (lane) {
    case Lane::kTcp:
      return MR_STRICT | MR_LANE_TCP;
    case Lane::kVerbs:
      return MR_STRICT | MR_LANE_VERBS;
    case Lane::kLocal:
      return MR_STRICT;
    default:
      return MR_STRICT | MR_LANE_SHM;
  }
}

mr_view remote_view(const TransferPlan& plan) {
  mr_view view{};
  view.run = plan.strided.pieces ? plan.strided.run : plan.size;
  if (plan.strided.pieces) {
    view.ndim = 1;
    view.count[0] = plan.strided.pieces;
    view.stride[0] = 2 * plan.strided.run;
  }
  return view;
}

mr_view local_view(const TransferPlan& plan) {
  mr_view view{};
  view.run = plan.size;
  return view;
}

uint64_t region_bytes(uint64_t size, const Strided& strided) {
  return strided.pieces ? strided.pieces * 2 * strided.run : std::max<uint64_t>(size, 8);
}

namespace {

Buffer local_memory(size_t regions, const TransferPlan& plan) {
  uint64_t slot = Transfers::slot_bytes(plan);
  Buffer local = Buffer::touched(slot * plan.depth * regions);
  for (uint64_t at = 0; plan.op == Op::kWrite && at < local.size(); at += slot)
    fill_pattern(local.data() + at, 0, plan.size, kWriteSeed);
  return local;
}

}  // namespace

Transfers::Transfers(const std::vector<mr_remote*>& regions, const TransferPlan& plan)
    : Transfers(regions, plan, local_memory(regions.size(), plan)) {}

Transfers::Transfers(const std::vector<mr_remote*>& regions, const TransferPlan& plan, Buffer local)
    : regions_(regions), plan_(plan), local_(std::move(local)), flying_(regions.size() * plan.depth * steps()) {}

Transfers::~Transfers() {
  for (mr_op* op : flying_) {  // only after a failure: local memory must outlive the operations
    if (!op) continue;
    mr_op_cancel(op);
    mr_op_wait(op, -1);
    mr_op_release(op);
  }
  if (keeper_) mr_memory_forget(keeper_, local_.data(), local_.size());
}

void Transfers::keep(mr_engine* engine) {
  mr_error error{};
  check(mr_memory_keep(engine, local_.data(), local_.size(), &error), error, "keeping local memory");
  keeper_ = engine;
}

// Slot s works on region s % regions; its local memory is its own. Null where it has ended well already, which only one
// that need not explain itself does.
mr_op* Transfers::start(uint64_t index, uint64_t piece, bool explains) {
  mr_remote* remote = regions_[index % regions_.size()];
  uint8_t* local = slot(index);
  slots_used_ = std::max(slots_used_, index + 1);
  uint32_t verb = plan_.op == Op::kWrite ? MR_WRITE : MR_READ;
  mr_op* op = nullptr;
  int kind;
  if (plan_.op == Op::kFetchAdd) {
    kind = mr_fetch_add(remote, 0, 1, kOperationTimeout, &op, &error_);
  } else if (plan_.one_by_one) {
    uint64_t run = plan_.strided.run;
    kind = mr_transfer_bytes(remote, verb, local + piece * run, 2 * piece * run, run, kOperationTimeout, plan_.flags,
                             &op, &error_);
  } else if (plan_.strided.pieces) {
    mr_view here = local_view(plan_), there = remote_view(plan_);
    kind = mr_transfer(remote, verb, local, &here, &there, kOperationTimeout, plan_.flags, 0, 0, &op, &error_);
  } else if (explains) {
    kind = mr_transfer_bytes(remote, verb, local, 0, plan_.size, kOperationTimeout, plan_.flags, &op, &error_);
  } else {
    const int64_t moved = mr_move_bytes(remote, verb, reinterpret_cast<uintptr_t>(local), 0, plan_.size,
                                        kOperationTimeout, plan_.flags, &op, &error_);
    kind = static_cast<int>(-std::min<int64_t>(moved, 0));
  }
  check(kind, error_, name_of(plan_.op));
  return op;
}

void Transfers::wait(mr_op* op) {
  ++operations_;
  if (op == nullptr) return;
  if (!mr_op_wait(op, -1) || mr_op_result(op, nullptr) != MR_OK) {  // the operation has its own deadline
    mr_result result{};
    mr_op_result(op, &result);
    mr_op_release(op);
    throw Failure(std::string(name_of(plan_.op)) + ": " + result.message);
  }
  mr_op_release(op);
}

mr_result Transfers::probe() {
  mr_result result = finish(start(0, 0, true), name_of(plan_.op));
  ++operations_;
  return result;
}

void Transfers::latency(const Turn& turn, std::vector<double>& samples) {
  double end = now() + turn.seconds, before = now();
  for (uint64_t done = 0; done < turn.operations && (done == 0 || before < end); ++done) {
    for (uint64_t piece = 0; piece < steps(); ++piece) wait(start(done % regions_.size(), piece));
    double after = now();
    samples.push_back(after - before);
    before = after;
  }
}

Moved Transfers::window(const Turn& turn, const std::atomic<bool>* stop) {
  Deadline deadline(turn.seconds);
  const double started = now();
  const uint64_t pieces = steps(), slots = flying_.size() / pieces;
  uint64_t operations = 0, slot = 0, piece = 0;  // of the next start
  size_t first = 0, in_flight = 0;               // a ring: flying_[first] is the oldest
  for (bool more = true;;) {
    for (; more && in_flight < flying_.size(); ++in_flight) {
      flying_[slot * pieces + piece] = start(slot, piece);
      if (++piece < pieces) continue;
      piece = 0;
      slot = slot + 1 < slots ? slot + 1 : 0;
      more = ++operations < turn.operations && !deadline.passed() && !(stop && *stop);
    }
    if (in_flight == 0) break;
    wait(std::exchange(flying_[first], nullptr));
    first = first + 1 < flying_.size() ? first + 1 : 0;
    --in_flight;
  }
  return {operations, operations * plan_.size, now() - started};
}

}  // namespace mr::bench
