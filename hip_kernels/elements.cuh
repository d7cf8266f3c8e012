// Elements of every dtype on the device: those of the CPU, but that the processor converts fp16 itself.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

#include "device.cuh"
#include "kernels/elements.h"

namespace mr {

struct Half {
  using Storage = uint16_t;
  using Value = float;
  __device__ __forceinline__ static float load(uint16_t stored) { return __half2float(__ushort_as_half(stored)); }
  __device__ __forceinline__ static uint16_t store(float value) {
    return value != value ? uint16_t(Float16::kNaN) : __half_as_ushort(__float2half_rn(value));
  }
};

// A NaN is one pattern, whichever processor made it.
template <typename Value>
__device__ __forceinline__ Value canonical(Value value) {
  if constexpr (std::is_floating_point_v<Value>) return value != value ? Value(float_from_bits(kFloatNaN)) : value;
  return value;
}

// Calls use(Element<dtype>()); false for a number that is no dtype, or none of these.
MR_CALLS_EITHER template <typename Use>
__host__ __device__ __forceinline__ bool with_float(uint32_t dtype, Use use) {
  // clang-format off
  switch (dtype) {
    case MR_F32: use(Element<MR_F32>()); return true;
    case MR_F16: use(Half()); return true;
    case MR_BF16: use(Element<MR_BF16>()); return true;
    default: return false;
  }
  // clang-format on
}

MR_CALLS_EITHER template <typename Use>
__host__ __device__ __forceinline__ bool with_any(uint32_t dtype, Use use) {
  // clang-format off
  switch (dtype) {
    case MR_U8: use(Element<MR_U8>()); return true;
    case MR_I8: use(Element<MR_I8>()); return true;
    case MR_I16: use(Element<MR_I16>()); return true;
    case MR_I32: use(Element<MR_I32>()); return true;
    case MR_I64: use(Element<MR_I64>()); return true;
    case MR_F64: use(Element<MR_F64>()); return true;
    case MR_E4M3FN: use(Element<MR_E4M3FN>()); return true;
    case MR_E5M2: use(Element<MR_E5M2>()); return true;
    case MR_E4M3FNUZ: use(Element<MR_E4M3FNUZ>()); return true;
    case MR_E5M2FNUZ: use(Element<MR_E5M2FNUZ>()); return true;
    case MR_BOOL: use(Element<MR_BOOL>()); return true;
    default: return with_float(dtype, use);
  }
  // clang-format on
}

}  // namespace mr
