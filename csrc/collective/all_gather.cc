#include "patterns.h"

namespace mr {
namespace {

void in_rounds(Group& group, const Call& call) {
  const uint32_t rank = group.rank(), size = group.size();
  const bool is_ring = call.what.algorithm == MR_RING;
  const uint64_t* const sizes = call.what.output_bytes;
  Rounds rounds{is_ring ? ring_all_gather(rank, size) : dissemination(rank, size)};
  for (uint32_t each = 0; each < size; ++each) rounds.total += sizes[each];
  rounds.memory = [&](uint64_t, uint32_t block) {
    const uint32_t whose = is_ring ? block : (rank + block) % size;
    return BlockMemory{whose == rank ? input(call, 0) : nullptr, output(call, whose), sizes[whose]};
  };
  copy(output(call, rank), input(call, 0), sizes[rank]);
  run_rounds(group, call, rounds);
}

}  // namespace

void all_gather(Group& group, const Call& call) {
  if (!is_direct(group, call)) return in_rounds(group, call);
  const uint64_t* const sizes = call.what.output_bytes;
  const uint64_t ours = sizes[group.rank()], largest = *std::max_element(sizes, sizes + group.size());
  const Windows windows{room_for_one(group)};
  Flow flow;
  for (uint32_t each = 0; each < group.size(); ++each) flow.total += sizes[each];
  flow.piece_bytes = windows.window;
  flow.num_steps = windows.steps(largest);
  flow.stage = [&](uint64_t step, uint32_t) {
    const Piece piece = windows.piece(input(call, 0), ours, step);
    copy(output(call, group.rank()) + windows.at(step), piece.at, piece.bytes);
    return piece;
  };
  flow.take = [&](uint64_t step, uint32_t from, uint64_t) { return output(call, from) + windows.at(step); };
  flow.length = [&](uint64_t step, uint32_t from) { return windows.length(sizes[from], step); };
  run_flow(group, call, flow);
}

}  // namespace mr
