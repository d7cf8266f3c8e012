#include "patterns.h"

namespace mr {
namespace {

// The most bytes that any member has for another one: nobody knows that by himself.
uint64_t largest_of_all(Group& group, const Call& call) {
  uint64_t largest = *std::max_element(call.what.input_bytes, call.what.input_bytes + group.size());
  const uint64_t ours = largest;
  Flow flow;
  flow.piece_bytes = sizeof ours;
  flow.stage = [&](uint64_t, uint32_t, uint8_t* piece) {
    std::memcpy(piece, &ours, sizeof ours);
    return sizeof ours;
  };
  flow.take = [&](uint64_t, uint32_t, const uint8_t* piece, uint64_t) {
    uint64_t theirs;
    std::memcpy(&theirs, piece, sizeof theirs);
    largest = std::max(largest, theirs);
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
  flow.stage = [&](uint64_t step, uint32_t to, uint8_t* piece) {
    const uint64_t length = windows.length(sizes[to], step);
    copy(piece, input(call, to) + windows.at(step), length);
    return length;
  };
  flow.take = [&](uint64_t step, uint32_t from, const uint8_t* piece, uint64_t length) {
    if (length != windows.length(expected[from], step)) {
      group.fail(from, MR_CONFIG,
                 "it sends other than the " + std::to_string(expected[from]) + " bytes that rank " +
                     std::to_string(group.rank()) + " expects of it in an all_to_all");
      throw Error(group.failure());
    }
    copy(output(call, from) + windows.at(step), piece, length);
  };
  copy(output(call, group.rank()), input(call, group.rank()), sizes[group.rank()]);
  run_flow(group, call, flow);
}

}  // namespace mr
