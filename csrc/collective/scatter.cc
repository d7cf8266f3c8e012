#include "patterns.h"

namespace mr {
namespace {

// On the way down a member has what those below it get.
void in_rounds(Group& group, const Call& call, uint64_t bytes) {
  const uint32_t rank = from_root(group, call), size = group.size();
  const Windows windows{room_for_one(group)};
  const Scratch scratch(rank == 0 ? 0 : size - rank, windows.length(bytes, 0));
  Rounds rounds{tree_scatter(rank, size), call.what.root, bytes, windows.steps(bytes)};
  rounds.memory = [&](uint64_t window, uint32_t block) {
    BlockMemory memory{nullptr, nullptr, windows.length(bytes, window)};
    if (rank == 0)
      memory.given = input(call, (block + call.what.root) % size) + windows.at(window);
    else
      memory.place = block == rank ? output(call, 0) + windows.at(window) : scratch.block(block - rank);
    return memory;
  };
  if (rank == 0) copy(output(call, 0), input(call, group.rank()), bytes);
  run_rounds(group, call, rounds);
}

}  // namespace

void scatter(Group& group, const Call& call) {
  const uint64_t bytes = call.what.output_bytes[0];
  if (!is_direct(group, call)) return in_rounds(group, call, bytes);
  const Windows windows{room_by_rank(group)};
  Flow flow;
  flow.total = bytes;
  flow.giver = call.what.root;
  flow.by_rank = true;
  flow.piece_bytes = windows.window;
  flow.num_steps = windows.steps(bytes);
  flow.stage = [&](uint64_t step, uint32_t to) { return windows.piece(input(call, to), bytes, step); };
  flow.take = [&](uint64_t step, uint32_t, uint64_t) { return output(call, 0) + windows.at(step); };
  if (call.what.root == group.rank()) copy(output(call, 0), input(call, group.rank()), bytes);
  run_flow(group, call, flow);
}

}  // namespace mr
