// Folding shards into one, in their order: the part that reduce and the collectives share.
#pragma once

#include <type_traits>

#include "elements.cuh"

namespace mr {

// Elements that a thread handles at once: 16 bytes of them.
template <typename Element>
constexpr int kVector = 16 / sizeof(typename Element::Storage);

// Of two equal values the first stays, of two NaNs as well; integers wrap around.
template <typename Value>
__device__ __forceinline__ Value fold(uint32_t op, Value sofar, Value next) {
  if (op == MR_GPU_MIN) return next < sofar || next != next ? next : sofar;
  if (op == MR_GPU_MAX) return next > sofar || next != next ? next : sofar;
  if constexpr (std::is_integral_v<Value>) {
    using Unsigned = std::conditional_t<sizeof(Value) == 8, uint64_t, uint32_t>;
    const Unsigned a = Unsigned(sofar), b = Unsigned(next);
    return Value(op == MR_GPU_PROD ? a * b : a + b);
  } else {
    return op == MR_GPU_PROD ? sofar * next : sofar + next;
  }
}

// Folds element group `at` of all shards: shard(s) is where shard s begins, target where the result goes.
template <typename Element, int kCount, typename ShardAt>
__device__ __forceinline__ void fold_group(uint32_t op, uint32_t shards, ShardAt shard, uint64_t at, void* target) {
  using Storage = typename Element::Storage;
  using Value = typename Element::Value;
  Storage stored[kCount];
  Value sofar[kCount];
  load(static_cast<const Storage*>(shard(0)) + at, stored);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sofar[i] = Element::load(stored[i]);
#pragma unroll 4
  for (uint32_t s = 1; s < shards; ++s) {
    load(static_cast<const Storage*>(shard(s)) + at, stored);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sofar[i] = fold(op, sofar[i], Element::load(stored[i]));
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_floating_point_v<Value>) {
      if (op == MR_GPU_AVG) sofar[i] = sofar[i] / Value(shards);
    }
    stored[i] = Element::store(canonical(sofar[i]));
  }
  store(static_cast<Storage*>(target) + at, stored);
}

// Whether there is such a reduction of this dtype.
inline bool can_reduce(uint32_t dtype, uint32_t op) {
  if (op == MR_GPU_AVG) return dtype >= MR_F32 && dtype <= MR_E5M2FNUZ;
  return dtype < MR_NUM_DTYPES && op <= MR_GPU_PROD && (dtype != MR_BOOL || op == MR_GPU_MIN || op == MR_GPU_MAX);
}

}  // namespace mr
