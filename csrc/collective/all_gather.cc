#include "patterns.h"

namespace mr {

void all_gather(Group& group, const Call& call) {
  const uint64_t* const sizes = call.what.output_bytes;
  const uint64_t ours = sizes[group.rank()], largest = *std::max_element(sizes, sizes + group.size());
  const Windows windows{room_for_one(group)};
  Flow flow;
  for (uint32_t each = 0; each < group.size(); ++each) flow.total += sizes[each];
  flow.piece_bytes = windows.window;
  flow.num_steps = windows.steps(largest);
  flow.stage = [&](uint64_t step, uint32_t) {
    const Piece piece = windows.piece(input(call, 0), ours, step);
    copy(output(call, group.rank()) + windows.at(step), piece.at, piece.bytes);
    return piece;
  };
  flow.take = [&](uint64_t step, uint32_t from, uint64_t) { return output(call, from) + windows.at(step); };
  flow.length = [&](uint64_t step, uint32_t from) { return windows.length(sizes[from], step); };
  run_flow(group, call, flow);
}

}  // namespace mr
