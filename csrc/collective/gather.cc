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
  flow.stage = [&](uint64_t step, uint32_t, uint8_t* piece) {
    const uint64_t length = windows.length(bytes, step);
    const uint8_t* const from = input(call, 0) + windows.at(step);
    copy(is_root ? output(call, group.rank()) + windows.at(step) : piece, from, length);
    return is_root ? 0 : length;
  };
  flow.take = [&](uint64_t step, uint32_t from, const uint8_t* piece, uint64_t length) {
    copy(output(call, from) + windows.at(step), piece, length);
  };
  run_flow(group, call, flow);
}

}  // namespace mr
