#include "patterns.h"

namespace mr {
namespace {

void in_rounds(Group& group, const Call& call, uint64_t bytes, const Windows& windows) {
  const uint32_t rank = from_root(group, call), size = group.size();
  const Scratch scratch(rank == 0 ? 0 : 1, windows.length(bytes, 0));
  Rounds rounds{call.what.algorithm == MR_RING ? chain_reduce(rank, size) : tree_reduce(rank, size)};
  rounds.root = call.what.root;
  rounds.total = bytes;
  rounds.num_windows = windows.steps(bytes);
  rounds.memory = [&](uint64_t window, uint32_t) {
    return BlockMemory{input(call, 0) + windows.at(window),
                       rank == 0 ? output(call, 0) + windows.at(window) : scratch.block(0),
                       windows.length(bytes, window)};
  };
  run_rounds(group, call, rounds);
}

}  // namespace

void reduce(Group& group, const Call& call) {
  const uint64_t bytes = call.what.input_bytes[0];
  const Windows windows{room_for_one(group)};
  if (!is_direct(group, call)) return in_rounds(group, call, bytes, windows);
  Flow flow;
  flow.total = bytes;
  flow.taker = call.what.root;
  flow.piece_bytes = windows.window;
  flow.num_steps = windows.steps(bytes);
  flow.stage = [&](uint64_t step, uint32_t) {
    return call.what.root == group.rank() ? Piece{} : windows.piece(input(call, 0), bytes, step);
  };
  flow.take_all = [&](uint64_t step, Pieces& pieces) {
    pieces[group.rank()] = input(call, 0) + windows.at(step);
    reduce_shards(call, pieces, output(call, 0) + windows.at(step), windows.length(bytes, step));
  };
  run_flow(group, call, flow);
}

}  // namespace mr
