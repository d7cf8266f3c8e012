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
  flow.stage = [&](uint64_t step, uint32_t, uint8_t* piece) {
    if (call.what.root == group.rank()) return uint64_t{0};
    const uint64_t length = windows.length(bytes, step);
    copy(piece, input(call, 0) + windows.at(step), length);
    return length;
  };
  flow.take_all = [&](uint64_t step, Pieces& pieces) {
    pieces[group.rank()] = input(call, 0) + windows.at(step);
    reduce_shards(call, pieces, output(call, 0) + windows.at(step), windows.length(bytes, step));
  };
  run_flow(group, call, flow);
}

}  // namespace mr
