#include "patterns.h"

namespace mr {
namespace {

struct Shape {
  uint32_t inputs, outputs;
};

// How many pieces of memory a call has here.
Shape shape_of(const mr_collective& call, uint32_t rank, uint32_t size) {
  const bool is_root = call.root == rank;
  switch (call.kind) {
    case MR_BARRIER:
      return {0, 0};
    case MR_BROADCAST:
      return {is_root ? 1u : 0, is_root ? 0u : 1};
    case MR_ALL_REDUCE:
      return {1, 1};
    case MR_REDUCE:
      return {1, is_root ? 1u : 0};
    case MR_REDUCE_SCATTER:
      return {size, 1};
    case MR_ALL_GATHER:
      return {1, size};
    case MR_GATHER:
      return {1, is_root ? size : 0};
    case MR_SCATTER:
      return {is_root ? size : 0, 1};
    case MR_ALL_TO_ALL:
      return {size, size};
  }
  throw Error(MR_CONFIG,
              "argument kind is " + std::to_string(call.kind) + ", but must be one of enum mr_collective_kind");
}

bool reduces(uint32_t kind) { return kind == MR_ALL_REDUCE || kind == MR_REDUCE || kind == MR_REDUCE_SCATTER; }

void demand(bool holds, const std::string& what) {
  if (!holds) throw Error(MR_CONFIG, what);
}

void check_memory(const char* name, uint32_t count, uint32_t expected, const void* const* memory,
                  const uint64_t* bytes) {
  demand(count == expected, std::string("argument ") + name + "s has " + std::to_string(count) +
                                " pieces of memory, but must have " + std::to_string(expected));
  for (uint32_t i = 0; i < count; ++i)
    demand(memory[i] != nullptr || bytes[i] == 0, std::string("argument ") + name + "s[" + std::to_string(i) +
                                                      "] is NULL for " + std::to_string(bytes[i]) + " bytes");
}

void same_bytes(const char* name, uint64_t bytes, uint64_t expected) {
  demand(bytes == expected, std::string("argument ") + name + " has " + std::to_string(bytes) +
                                " bytes, but must have " + std::to_string(expected));
}

void check_sizes(const mr_collective& call, uint32_t rank) {
  switch (call.kind) {
    case MR_ALL_REDUCE:
      return same_bytes("outputs[0]", call.output_bytes[0], call.input_bytes[0]);
    case MR_REDUCE:
      if (call.num_outputs != 0) same_bytes("outputs[0]", call.output_bytes[0], call.input_bytes[0]);
      return;
    case MR_REDUCE_SCATTER:
      return same_bytes("outputs[0]", call.output_bytes[0], call.input_bytes[rank]);
    case MR_ALL_GATHER:
      return same_bytes("inputs[0]", call.input_bytes[0], call.output_bytes[rank]);
    case MR_ALL_TO_ALL:
      return same_bytes("outputs[rank]", call.output_bytes[rank], call.input_bytes[rank]);
    case MR_GATHER:
      for (uint32_t i = 0; i < call.num_outputs; ++i)
        same_bytes("outputs[i]", call.output_bytes[i], call.input_bytes[0]);
      return;
    case MR_SCATTER:
      for (uint32_t i = 0; i < call.num_inputs; ++i) same_bytes("inputs[i]", call.input_bytes[i], call.output_bytes[0]);
      return;
  }
}

}  // namespace

bool has_algorithm(uint32_t kind, uint32_t algorithm) {
  switch (kind) {
    case MR_BARRIER:
      return algorithm == MR_DIRECT || algorithm == MR_DOUBLING;
    case MR_ALL_REDUCE:
      return algorithm <= MR_RING;
    case MR_REDUCE_SCATTER:
      return algorithm == MR_DIRECT || algorithm == MR_HALVING || algorithm == MR_RING;
    case MR_ALL_GATHER:
      return algorithm == MR_DIRECT || algorithm == MR_DOUBLING || algorithm == MR_RING;
    case MR_BROADCAST:
    case MR_REDUCE:
      return algorithm == MR_DIRECT || algorithm == MR_RING || algorithm == MR_TREE;
    case MR_GATHER:
    case MR_SCATTER:
      return algorithm == MR_DIRECT || algorithm == MR_TREE;
    default:
      return algorithm == MR_DIRECT;
  }
}

void check_call(const Group& group, const mr_collective& call) {
  demand(group.is_joined(), "the group has not been joined yet");
  demand(call.root < group.size(), "argument root is " + std::to_string(call.root) + " in a group of " +
                                       std::to_string(group.size()) + " members");
  const Shape shape = shape_of(call, group.rank(), group.size());
  check_memory("input", call.num_inputs, shape.inputs, call.inputs, call.input_bytes);
  check_memory("output", call.num_outputs, shape.outputs, call.outputs, call.output_bytes);
  check_sizes(call, group.rank());
  check_overlaps(call, group.rank());
  demand(has_algorithm(call.kind, call.algorithm),
         "argument algorithm is " + std::to_string(call.algorithm) + ", which the collective does not have");
  if (!reduces(call.kind)) return;
  demand(call.dtype <= MR_BOOL && call.reduction <= static_cast<uint32_t>(kernels::ReduceOp::prod),
         "arguments dtype and reduction are " + std::to_string(call.dtype) + " and " + std::to_string(call.reduction) +
             ", but must be of enum mr_dtype and enum mr_reduction");
  const auto dtype = static_cast<mr_dtype>(call.dtype);
  demand(kernels::can_reduce(dtype, static_cast<kernels::ReduceOp>(call.reduction)),
         "reduction " + std::to_string(call.reduction) + " is not defined for dtype " + std::to_string(call.dtype));
  for (uint32_t i = 0; i < call.num_inputs; ++i)
    demand(call.input_bytes[i] % dtype_size(dtype) == 0,
           "argument inputs[" + std::to_string(i) + "] has " + std::to_string(call.input_bytes[i]) +
               " bytes, which are no elements of " + std::to_string(dtype_size(dtype)));
}

void reduce_shards(const Call& call, const Pieces& shards, uint8_t* out, uint64_t bytes) {
  const auto dtype = static_cast<mr_dtype>(call.what.dtype);
  kernels::reduce(dtype, static_cast<kernels::ReduceOp>(call.what.reduction),
                  reinterpret_cast<const void* const*>(shards.data()), shards.size(), out, bytes / dtype_size(dtype),
                  call.what.divisor);
}

bool averages(const Call& call) {
  return reduces(call.what.kind) && call.what.reduction == static_cast<uint32_t>(kernels::ReduceOp::avg);
}

void give(const Group& group, const Call& call, uint8_t* out, const uint8_t* given, uint64_t bytes) {
  if (!averages(call)) return copy(out, given, bytes);
  const auto dtype = static_cast<mr_dtype>(call.what.dtype);
  const void* const shards[] = {given};
  kernels::reduce(dtype, kernels::ReduceOp::avg, shards, 1, out, bytes / dtype_size(dtype),
                  call.what.divisor != 0 ? call.what.divisor : group.size());
}

void combine(const Call& call, const uint8_t* first, const uint8_t* second, uint8_t* out, uint64_t bytes) {
  const auto dtype = static_cast<mr_dtype>(call.what.dtype);
  const auto op = averages(call) ? kernels::ReduceOp::sum : static_cast<kernels::ReduceOp>(call.what.reduction);
  const void* const shards[] = {first, second};
  kernels::reduce(dtype, op, shards, 2, out, bytes / dtype_size(dtype));
}

void run_collective(Group& group, const mr_collective& what, Time deadline) {
  static void (*const patterns[])(Group&, const Call&) = {barrier,    broadcast, all_reduce, reduce,    reduce_scatter,
                                                          all_gather, gather,    scatter,    all_to_all};
  const std::lock_guard guard(group.running);
  group.check();
  const Call call{what, deadline};
  ++group.turn;
  try {
    patterns[what.kind](group, call);
  } catch (const Error& error) {
    // Whatever it was, the others wait for something that will not come any more.
    if (!group.has_failed()) group.fail(group.rank(), error.status().kind, error.status().text);
    throw Error(error.status().kind, call.text() + ": " + error.status().text);
  }
}

}  // namespace mr
