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
  flow.stage = [&](uint64_t step, uint32_t to) { return windows.piece(input(call, to), bytes, step); };
  flow.take = [&](uint64_t step, uint32_t, uint64_t) { return output(call, 0) + windows.at(step); };
  if (call.what.root == group.rank()) copy(output(call, 0), input(call, group.rank()), bytes);
  run_flow(group, call, flow);
}

}  // namespace mr
