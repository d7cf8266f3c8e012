// quantize, dequantize: blocks of elements as fp8 or int8 with one fp32 scale each, and what rounding lost (the error).
//
// A thread holds 16 elements. A block of up to 512 is held by neighbouring lanes, in registers; a larger one is walked
// twice by a block of threads, the second time out of the caches.

#include <cuda_runtime.h>

#include "elements.cuh"

namespace mr {
namespace {

constexpr int kGroup = 16;
constexpr int kTeam = 32;  // lanes that may share a block: those of the smallest warp

struct Int8 {
  using Storage = int8_t;
  __device__ __forceinline__ static float largest() { return 127.0f; }
  __device__ __forceinline__ static float to_float(int8_t stored) { return stored; }
  __device__ __forceinline__ static int8_t from_float(float value, bool) {
    return int8_t(rintf(value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value));
  }
};

// Calls use(Quantum()) with the type of the quantised elements.
MR_CALLS_EITHER template <typename Use>
__host__ __device__ __forceinline__ bool with_quantum(uint32_t dtype, Use use) {
  // clang-format off
  switch (dtype) {
    case MR_I8: use(Int8()); return true;
    case MR_E4M3FN: use(E4M3FN()); return true;
    case MR_E5M2: use(E5M2()); return true;
    case MR_E4M3FNUZ: use(E4M3FNUZ()); return true;
    case MR_E5M2FNUZ: use(E5M2FNUZ()); return true;
    default: return false;
  }
  // clang-format on
}

// Elements from `at` on, one by one where fewer than a group are left or pointers are not aligned; the rest are 0.
template <typename T>
__device__ __forceinline__ void load_some(const T* at, uint64_t some, bool wide, T (&out)[kGroup]) {
  if (wide && some >= kGroup) return load(at, out);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) out[i] = uint64_t(i) < some ? at[i] : T(0);
}

template <typename T>
__device__ __forceinline__ void store_some(T* at, uint64_t some, bool wide, const T (&in)[kGroup]) {
  if (wide && some >= kGroup) return store(at, in);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (uint64_t(i) < some) at[i] = in[i];
  }
}

// The largest magnitude of all, as the bits of an fp32: those of Inf and NaN are above those of every number.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

template <typename Element>
struct Quantizer {
  const mr_quantize_args& args;
  bool wide;

  // x + error
  __device__ __forceinline__ void values(uint64_t at, uint64_t some, float (&value)[kGroup]) const {
    typename Element::Storage x[kGroup];
    load_some(static_cast<const typename Element::Storage*>(args.x) + at, some, wide, x);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) value[i] = Element::load(x[i]);
    if (args.error == nullptr) return;
    float error[kGroup];
    load_some(args.error + at, some, wide, error);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) value[i] += error[i];
  }

  __device__ __forceinline__ static uint32_t magnitude(const float (&value)[kGroup]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) most = larger(most, float_bits(value[i]) & 0x7fffffffu);
    return most;
  }

  // NaN where the block has a NaN or Inf; 1 where there is nothing, or too little for any scale.
  template <typename Quantum>
  __device__ __forceinline__ static float scale_of(uint32_t most) {
    const float exact = float_from_bits(most) / Quantum::largest();
    return most >= kFloatInf ? float_from_bits(kFloatNaN) : exact == 0 ? 1.0f : exact;
  }

  template <typename Quantum>
  __device__ __forceinline__ void write(uint64_t at, uint64_t some, const float (&value)[kGroup], float scale) const {
    const bool valid = scale == scale;
    typename Quantum::Storage q[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) q[i] = Quantum::from_float(valid ? value[i] / scale : 0.0f, true);
    store_some(static_cast<typename Quantum::Storage*>(args.q) + at, some, wide, q);
    if (args.error == nullptr) return;
    float error[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      error[i] = valid ? value[i] - rounded_product(Quantum::to_float(q[i]), scale) : 0.0f;
    }
    store_some(args.error + at, some, wide, error);
  }
};

// `team` neighbouring lanes (a power of two) for each block.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    quantize_narrow(const mr_quantize_args args, uint64_t blocks, int team, bool wide) {
  const Quantizer<Element> quantizer{args, wide};
  const int member = int(threadIdx.x) % team;
  const uint64_t teams = all_threads() / team;
  const uint64_t rounds = (blocks + teams - 1) / teams;  // the same for all lanes of a warp, which shuffle
  uint64_t block = global_thread() / team;
  for (uint64_t round = 0; round < rounds; ++round, block += teams) {
    const uint64_t begin = block * args.block, end = begin + args.block < args.count ? begin + args.block : args.count;
    const uint64_t at = begin + uint64_t(member) * kGroup;
    const uint64_t some = block < blocks && at < end ? end - at : 0;
    float value[kGroup];
    quantizer.values(at, some, value);
    const uint32_t most = across(quantizer.magnitude(value), team, larger);
    if (some == 0) continue;
    with_quantum(args.q_dtype, [&](auto quantum) {
      using Quantum = decltype(quantum);
      const float scale = quantizer.template scale_of<Quantum>(most);
      if (member == 0) args.scales[block] = scale;
      quantizer.template write<Quantum>(at, some, value, scale);
    });
  }
}

// A block of threads for each block.
template <typename Element>
__global__ void __launch_bounds__(kThreads) quantize_wide(const mr_quantize_args args, uint64_t blocks, bool wide) {
  const Quantizer<Element> quantizer{args, wide};
  float value[kGroup];
  for (uint64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const uint64_t begin = block * args.block, end = begin + args.block < args.count ? begin + args.block : args.count;
    uint32_t most = 0;
    for (uint64_t at = begin + uint64_t(threadIdx.x) * kGroup; at < end; at += uint64_t(kThreads) * kGroup) {
      quantizer.values(at, end - at, value);
      most = larger(most, quantizer.magnitude(value));
    }
    most = across_block(most, larger);
    with_quantum(args.q_dtype, [&](auto quantum) {
      using Quantum = decltype(quantum);
      const float scale = quantizer.template scale_of<Quantum>(most);
      if (threadIdx.x == 0) args.scales[block] = scale;
      for (uint64_t at = begin + uint64_t(threadIdx.x) * kGroup; at < end; at += uint64_t(kThreads) * kGroup) {
        quantizer.values(at, end - at, value);
        quantizer.template write<Quantum>(at, end - at, value, scale);
      }
    });
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) dequantize(const mr_dequantize_args args, bool wide) {
  for (uint64_t at = global_thread() * kGroup; at < args.count; at += all_threads() * kGroup) {
    const uint64_t block = at / args.block;  // a group lies in one block
    float sum[kGroup];
    with_quantum(args.q_dtype, [&](auto quantum) {
      using Quantum = decltype(quantum);
      using Storage = typename Quantum::Storage;
      for (uint32_t s = 0; s < args.shards; ++s) {
        Storage q[kGroup];
        load_some(static_cast<const Storage*>(args.q[s]) + at, args.count - at, wide, q);
        const float scale = args.scales[s][block];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const float value = rounded_product(Quantum::to_float(q[i]), scale);
          sum[i] = s == 0 ? value : sum[i] + value;
        }
      }
    });
    typename Element::Storage out[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) out[i] = Element::store(canonical(sum[i]));
    store_some(static_cast<typename Element::Storage*>(args.out) + at, args.count - at, wide, out);
  }
}

bool valid_block(uint64_t block) { return block > 0 && block % kGroup == 0; }
bool valid_quantum(uint32_t dtype) {
  return with_quantum(dtype, [](auto) {});
}

// How many lanes a block takes; 0 for more than there may be.
int team_for(uint64_t block) {
  int team = 1;
  while (team < kTeam && uint64_t(team) * kGroup < block) team *= 2;
  return uint64_t(team) * kGroup < block ? 0 : team;
}

}  // namespace
}  // namespace mr

extern "C" int mr_launch_quantize(const mr_quantize_args* args, void* stream) {
  if (!mr::valid_block(args->block) || !mr::valid_quantum(args->q_dtype)) return cudaErrorInvalidValue;
  if (args->count == 0) return cudaSuccess;
  const uint64_t blocks = args->count / args->block + (args->count % args->block != 0);
  const bool wide = mr::aligned16(args->x) && mr::aligned16(args->q) && mr::aligned16(args->error);
  const int team = mr::team_for(args->block < args->count ? args->block : args->count);
  const auto on = static_cast<cudaStream_t>(stream);
  const bool known = mr::with_float(args->x_dtype, [&](auto element) {
    using Element = decltype(element);
    if (team > 0) {
      const unsigned grid = mr::blocks_for(blocks * team);
      mr::quantize_narrow<Element><<<grid, mr::kThreads, 0, on>>>(*args, blocks, team, wide);
    } else {
      const unsigned grid = mr::blocks_for(blocks, 1);
      mr::quantize_wide<Element><<<grid, mr::kThreads, 0, on>>>(*args, blocks, wide);
    }
  });
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}

extern "C" int mr_launch_dequantize(const mr_dequantize_args* args, void* stream) {
  if (!mr::valid_block(args->block) || !mr::valid_quantum(args->q_dtype)) return cudaErrorInvalidValue;
  if (args->shards < 1 || args->shards > MR_GPU_SHARDS) return cudaErrorInvalidValue;
  if (args->count == 0) return cudaSuccess;
  bool wide = mr::aligned16(args->out);
  for (uint32_t s = 0; s < args->shards; ++s) wide = wide && mr::aligned16(args->q[s]);
  const unsigned grid = mr::blocks_for((args->count + mr::kGroup - 1) / mr::kGroup);
  const auto on = static_cast<cudaStream_t>(stream);
  const bool known = mr::with_float(args->out_dtype, [&](auto element) {
    using Element = decltype(element);
    mr::dequantize<Element><<<grid, mr::kThreads, 0, on>>>(*args, wide);
  });
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}
