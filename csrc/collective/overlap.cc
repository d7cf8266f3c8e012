// Memory that a call both reads and writes. The input that goes where an output comes from may be that output: in
// place. Whatever else overlaps would be read by others after it was written, or written twice.
#include <algorithm>
#include <tuple>

#include "patterns.h"

namespace mr {
namespace {

struct Block {
  uintptr_t begin, end;
  uint32_t index;
  bool is_output;
};

std::string name_of(const Block& block) {
  return (block.is_output ? "outputs[" : "inputs[") + std::to_string(block.index) + "]";
}

// Whether the input may be just the output's memory.
bool may_be_one(const mr_collective& call, uint32_t rank, uint32_t input, uint32_t output) {
  switch (call.kind) {
    case MR_ALL_GATHER:
    case MR_GATHER:
      return output == rank;
    case MR_REDUCE_SCATTER:
    case MR_SCATTER:
      return input == rank;
    default:
      return input == output;
  }
}

}  // namespace

void check_overlaps(const mr_collective& call, uint32_t rank) {
  if (call.num_outputs == 0) return;
  std::vector<Block> blocks;
  const auto add = [&](uint32_t index, const void* at, uint64_t bytes, bool is_output) {
    const auto begin = reinterpret_cast<uintptr_t>(at);
    if (bytes != 0) blocks.push_back({begin, begin + bytes, index, is_output});
  };
  for (uint32_t i = 0; i < call.num_inputs; ++i) add(i, call.inputs[i], call.input_bytes[i], false);
  for (uint32_t i = 0; i < call.num_outputs; ++i) add(i, call.outputs[i], call.output_bytes[i], true);
  // Of inputs that are the same memory, one that may not be the output's comes last.
  const auto place = [&](const Block& block) {
    return std::tuple(block.begin, block.end, block.is_output, block.index != rank);
  };
  std::sort(blocks.begin(), blocks.end(), [&](const Block& a, const Block& b) { return place(a) < place(b); });
  // Of those before a block, those that end last: one that is read, and one that is written.
  const Block* last[2] = {nullptr, nullptr};
  for (const Block& block : blocks) {
    for (const Block* before : last) {
      if (before == nullptr || before->end <= block.begin || (!before->is_output && !block.is_output)) continue;
      const Block &input = block.is_output ? *before : block, &output = block.is_output ? block : *before;
      const bool is_one = before->begin == block.begin && before->end == block.end;
      if (!input.is_output && is_one && may_be_one(call, rank, input.index, output.index)) continue;
      throw Error(MR_CONFIG, "arguments " + name_of(*before) + " and " + name_of(block) + " have memory in common");
    }
    const Block*& slot = last[block.is_output ? 1 : 0];
    if (slot == nullptr || slot->end <= block.end) slot = &block;
  }
}

bool exchanges_in_place(const mr_collective& call) {
  if (call.kind != MR_ALL_TO_ALL) return false;
  for (uint32_t i = 0; i < call.num_inputs; ++i)
    if (call.inputs[i] == call.outputs[i] && call.input_bytes[i] != 0) return true;
  return false;
}

}  // namespace mr
