#include "patterns.h"

namespace mr {

void gather(Group& group, const Call& call) {
  const uint64_t bytes = call.what.input_bytes[0];
  const bool is_root = call.what.root == group.rank();
  const Windows windows{room_for_one(group)};
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
