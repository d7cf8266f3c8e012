#include "patterns.h"

namespace mr {

void scatter(Group& group, const Call& call) {
  const uint64_t bytes = call.what.output_bytes[0];
  const Windows windows{room_by_rank(group)};
  Flow flow;
  flow.total = bytes;
  flow.giver = call.what.root;
  flow.by_rank = true;
  flow.piece_bytes = windows.window;
  flow.num_steps = windows.steps(bytes);
  flow.stage = [&](uint64_t step, uint32_t to, uint8_t* piece) {
    const uint64_t length = windows.length(bytes, step);
    copy(piece, input(call, to) + windows.at(step), length);
    return length;
  };
  flow.take = [&](uint64_t step, uint32_t, const uint8_t* piece, uint64_t length) {
    copy(output(call, 0) + windows.at(step), piece, length);
  };
  if (call.what.root == group.rank()) copy(output(call, 0), input(call, group.rank()), bytes);
  run_flow(group, call, flow);
}

}  // namespace mr
