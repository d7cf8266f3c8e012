#include "patterns.h"

namespace mr {
namespace {

// On the way up a member has what those below it give.
void in_rounds(Group& group, const Call& call, uint64_t bytes, const Windows& windows) {
  const uint32_t rank = from_root(group, call), size = group.size();
  const Scratch scratch(rank == 0 ? 0 : size - rank, windows.length(bytes, 0));
  Rounds rounds{tree_gather(rank, size), call.what.root, bytes, windows.steps(bytes)};
  rounds.memory = [&](uint64_t window, uint32_t block) {
    BlockMemory memory{nullptr, nullptr, windows.length(bytes, window)};
    if (block == rank)
      memory.given = input(call, 0) + windows.at(window);
    else
      memory.place =
          rank == 0 ? output(call, (block + call.what.root) % size) + windows.at(window) : scratch.block(block - rank);
    return memory;
  };
  if (rank == 0) copy(output(call, group.rank()), input(call, 0), bytes);
  run_rounds(group, call, rounds);
}

}  // namespace

void gather(Group& group, const Call& call) {
  const uint64_t bytes = call.what.input_bytes[0];
  const bool is_root = call.what.root == group.rank();
  const Windows windows{room_for_one(group)};
  if (!is_direct(group, call)) return in_rounds(group, call, bytes, windows);
  Flow flow;
  flow.total = bytes;
  flow.taker = call.what.root;
  flow.piece_bytes = windows.window;
  flow.num_steps = windows.steps(bytes);
  flow.stage = [&](uint64_t step, uint32_t) {
    const Piece piece = windows.piece(input(call, 0), bytes, step);
    if (!is_root) return piece;
    copy(output(call, group.rank()) + windows.at(step), piece.at, piece.bytes);
    return Piece{};
  };
  flow.take = [&](uint64_t step, uint32_t from, uint64_t) { return output(call, from) + windows.at(step); };
  run_flow(group, call, flow);
}

}  // namespace mr
