#include "patterns.h"

namespace mr {

void reduce(Group& group, const Call& call) {
  const uint64_t bytes = call.what.input_bytes[0];
  const Windows windows{room_for_one(group)};
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
