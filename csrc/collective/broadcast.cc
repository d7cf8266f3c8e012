#include "patterns.h"

namespace mr {

void broadcast(Group& group, const Call& call) {
  const bool is_root = call.what.root == group.rank();
  const uint64_t bytes = is_root ? call.what.input_bytes[0] : call.what.output_bytes[0];
  const Windows windows{room_for_one(group)};
  if (!is_direct(group, call)) {
    const uint32_t rank = from_root(group, call);
    const Plan plan =
        call.what.algorithm == MR_RING ? chain_broadcast(rank, group.size()) : tree_broadcast(rank, group.size());
    return run_rounds(group, call, {plan, call.what.root, bytes, windows.steps(bytes), [&](uint64_t window, uint32_t) {
                                      return BlockMemory{is_root ? input(call, 0) + windows.at(window) : nullptr,
                                                         is_root ? nullptr : output(call, 0) + windows.at(window),
                                                         windows.length(bytes, window)};
                                    }});
  }
  Flow flow;
  flow.total = bytes;
  flow.giver = call.what.root;
  flow.piece_bytes = windows.window;
  flow.num_steps = windows.steps(bytes);
  flow.stage = [&](uint64_t step, uint32_t) { return windows.piece(input(call, 0), bytes, step); };
  flow.take = [&](uint64_t step, uint32_t, uint64_t) { return output(call, 0) + windows.at(step); };
  run_flow(group, call, flow);
}

}  // namespace mr
