#include "patterns.h"

namespace mr {
namespace {

// The most bytes that any member has for another one: nobody knows that by himself.
uint64_t largest_of_all(Group& group, const Call& call) {
  uint64_t largest = *std::max_element(call.what.input_bytes, call.what.input_bytes + group.size());
  const uint64_t ours = largest;
  Flow flow;
  flow.piece_bytes = sizeof ours;
  flow.stage = [&](uint64_t, uint32_t) { return Piece{reinterpret_cast<const uint8_t*>(&ours), sizeof ours}; };
  flow.take_all = [&](uint64_t, Pieces& pieces) {
    for (const uint8_t* piece : pieces) {
      if (piece == nullptr) continue;  // ours
      uint64_t theirs;
      std::memcpy(&theirs, piece, sizeof theirs);
      largest = std::max(largest, theirs);
    }
  };
  run_flow(group, call, flow);
  return largest;
}

}  // namespace

void all_to_all(Group& group, const Call& call) {
  const uint64_t* const sizes = call.what.input_bytes;
  const uint64_t* const expected = call.what.output_bytes;
  const Windows windows{room_by_rank(group)};
  Flow flow;
  flow.by_rank = true;
  flow.piece_bytes = windows.window;
  flow.num_steps = windows.steps(largest_of_all(group, call));
  flow.stage = [&](uint64_t step, uint32_t to) { return windows.piece(input(call, to), sizes[to], step); };
  flow.length = [&](uint64_t step, uint32_t from) { return windows.length(expected[from], step); };
  flow.take = [&](uint64_t step, uint32_t from, uint64_t) { return output(call, from) + windows.at(step); };
  copy(output(call, group.rank()), input(call, group.rank()), sizes[group.rank()]);
  run_flow(group, call, flow);
}

}  // namespace mr
