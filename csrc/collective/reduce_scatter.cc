#include "patterns.h"

namespace mr {
namespace {

void in_rounds(Group& group, const Call& call) {
  const uint32_t rank = group.rank(), size = group.size();
  const uint64_t* const sizes = call.what.input_bytes;
  const uint64_t largest = *std::max_element(sizes, sizes + size);
  const Windows windows{room_for_one(group)};
  const Scratch scratch(size, windows.length(largest, 0));
  Rounds rounds{call.what.algorithm == MR_RING ? ring_reduce_scatter(rank, size) : halving_reduce_scatter(rank, size)};
  for (uint32_t each = 0; each < size; ++each) rounds.total += sizes[each];
  rounds.num_windows = windows.steps(largest);
  rounds.memory = [&](uint64_t window, uint32_t block) {
    const uint64_t at = std::min(sizes[block], windows.at(window));
    return BlockMemory{input(call, block) + at, block == rank ? output(call, 0) + at : scratch.block(block),
                       windows.length(sizes[block], window)};
  };
  run_rounds(group, call, rounds);
}

}  // namespace

void reduce_scatter(Group& group, const Call& call) {
  if (!is_direct(group, call)) return in_rounds(group, call);
  const uint32_t rank = group.rank();
  const uint64_t* const sizes = call.what.input_bytes;
  const uint64_t largest = *std::max_element(sizes, sizes + group.size());
  const Windows windows{room_by_rank(group)};
  Flow flow;
  for (uint32_t each = 0; each < group.size(); ++each) flow.total += sizes[each];
  flow.by_rank = true;
  flow.piece_bytes = windows.window;
  flow.num_steps = windows.steps(largest);
  flow.stage = [&](uint64_t step, uint32_t to) { return windows.piece(input(call, to), sizes[to], step); };
  flow.take_all = [&](uint64_t step, Pieces& pieces) {
    const uint64_t length = windows.length(sizes[rank], step);
    if (length == 0) return;
    pieces[rank] = input(call, rank) + windows.at(step);
    reduce_shards(call, pieces, output(call, 0) + windows.at(step), length);
  };
  flow.length = [&](uint64_t step, uint32_t) { return windows.length(sizes[rank], step); };
  run_flow(group, call, flow);
}

}  // namespace mr
