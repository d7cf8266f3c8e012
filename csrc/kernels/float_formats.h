// Element types of tensors, and the small floating formats in terms of fp32: the same code, and so the same bits, on
// CPU and GPU. For g++, nvcc and hipcc, C++17. No function has a branch that a vectoriser could not turn into selects.
//
//   to_float    exact
//   from_float  to the nearest, ties to even. What is too large becomes the largest finite value (saturate), or what
//               torch's .to() makes of it: Inf (fp16, bf16, e5m2), NaN (both fnuz), or for e4m3fn the largest finite
//               value as well (torch 2.13; older ones make it NaN)
//
// A NaN stays a NaN: from_float has one for each format, kNaN. The fnuz forms ("finite, no unsigned zero": AMD's MI300)
// have neither Inf nor -0, which becomes 0.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define MR_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MR_HOST_DEVICE __attribute__((always_inline)) inline
#endif

enum mr_dtype : uint8_t {
  MR_U8 = 0,
  MR_I8 = 1,
  MR_I16 = 2,
  MR_I32 = 3,
  MR_I64 = 4,
  MR_F32 = 5,
  MR_F64 = 6,
  MR_F16 = 7,
  MR_BF16 = 8,
  MR_E4M3FN = 9,
  MR_E5M2 = 10,
  MR_E4M3FNUZ = 11,
  MR_E5M2FNUZ = 12,
  MR_BOOL = 13,
  MR_NUM_DTYPES = 14
};

namespace mr {

// Not memcpy: HIP's headers make a loop over bytes of it.
MR_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

MR_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr uint32_t kFloatInf = 0x7f800000, kFloatNaN = 0x7fc00000;  // as bits

MR_HOST_DEVICE bool is_nan_bits(uint32_t float_bits) { return (float_bits & 0x7fffffffu) > kFloatInf; }

// What the largest exponent means.
enum class Special : uint8_t {
  ieee,     // Inf, and NaN
  one_nan,  // numbers, but all ones is NaN: no Inf ("fn")
  fnuz      // numbers; the only NaN is where -0 would be
};

template <typename Bits, int kExponent, int kMantissa, int kBias, Special kSpecial>
struct SmallFloat {
  using Storage = Bits;

  static constexpr uint32_t kMagnitude = (1u << (kExponent + kMantissa)) - 1;
  static constexpr uint32_t kSign = kMagnitude + 1;
  static constexpr uint32_t kTop = ((1u << kExponent) - 1) << kMantissa;  // the largest exponent, mantissa 0
  static constexpr uint32_t kNaN = kSpecial == Special::ieee      ? (kTop | (1u << kMantissa >> 1))
                                   : kSpecial == Special::one_nan ? kMagnitude
                                                                  : kSign;
  static constexpr uint32_t kLargest = kSpecial == Special::ieee      ? kTop - 1
                                       : kSpecial == Special::one_nan ? kMagnitude - 1
                                                                      : kMagnitude;
  static constexpr int kShift = 23 - kMantissa;  // from this mantissa to fp32's
  static constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  static constexpr uint32_t kLargestAsFloat = (kLargest << kShift) + kRebias;  // bits of the largest finite value
  static constexpr uint32_t kOverAsFloat = kLargestAsFloat + (1u << kShift);   // one step more: the pattern after it

  static constexpr uint32_t kSmallestNormalAsFloat = uint32_t(128 - kBias) << 23;
  // Bits of the power of two whose last place is the format's smallest step.
  static constexpr uint32_t kRoundingPower = uint32_t(127 + 1 - kBias - kMantissa + 23) << 23;

  MR_HOST_DEVICE static float to_float(Bits bits) {
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t normal = (magnitude << kShift) + kRebias;
    // As an integer times a power of two: no fp32 denormal is involved, which some processors are told to flush.
    const float step = float_from_bits(uint32_t(127 + 1 - kBias - kMantissa) << 23);
    const uint32_t subnormal = float_bits(float(int32_t(magnitude)) * step);
    uint32_t out = magnitude < (1u << kMantissa) ? subnormal : normal;
    if (kSpecial == Special::ieee) {
      const uint32_t quiet = magnitude > kTop ? kFloatNaN : kFloatInf;
      out = magnitude >= kTop ? ((magnitude - kTop) << kShift) | quiet : out;
    }
    if (kSpecial == Special::one_nan) out = magnitude == kMagnitude ? kFloatNaN : out;
    if (kSpecial == Special::fnuz) out = (bits & (kSign | kMagnitude)) == kSign ? kFloatNaN : out;
    const uint32_t sign = kSpecial == Special::fnuz && magnitude == 0 ? 0 : uint32_t(bits & kSign);
    return float_from_bits(out | (sign << (31 - kExponent - kMantissa)));
  }

  MR_HOST_DEVICE static Bits from_float(float value, bool saturate = false) {
    const uint32_t all = float_bits(value);
    uint32_t in = all & 0x7fffffffu;
    const bool nan = in > kFloatInf;
    // One step too large is the pattern that overflow should be: Inf, or the NaN of fnuz.
    const uint32_t most = saturate || kSpecial == Special::one_nan ? kLargestAsFloat : kOverAsFloat;
    in = in > most ? most : in;
    // Added to that power of two, a number is rounded by the processor.
    const uint32_t subnormal = float_bits(float_from_bits(in) + float_from_bits(kRoundingPower)) - kRoundingPower;
    const uint32_t normal = (in - kRebias + (1u << (kShift - 1)) - 1 + ((in >> kShift) & 1)) >> kShift;
    const uint32_t out = in < kSmallestNormalAsFloat ? subnormal : normal;
    uint32_t sign = (all >> 31) << (kExponent + kMantissa);
    if (kSpecial == Special::fnuz) sign = out == 0 ? 0 : sign;
    return Bits(nan ? kNaN : out | sign);
  }

  MR_HOST_DEVICE static float largest() { return float_from_bits(kLargestAsFloat); }
};

using Float16 = SmallFloat<uint16_t, 5, 10, 15, Special::ieee>;
using E4M3FN = SmallFloat<uint8_t, 4, 3, 7, Special::one_nan>;
using E5M2 = SmallFloat<uint8_t, 5, 2, 15, Special::ieee>;
using E4M3FNUZ = SmallFloat<uint8_t, 4, 3, 8, Special::fnuz>;
using E5M2FNUZ = SmallFloat<uint8_t, 5, 2, 16, Special::fnuz>;

struct BFloat16 {  // the upper half of an fp32
  using Storage = uint16_t;
  static constexpr uint32_t kNaN = kFloatNaN >> 16, kLargestAsFloat = 0x7f7f0000;

  MR_HOST_DEVICE static float to_float(uint16_t bits) { return float_from_bits(uint32_t(bits) << 16); }

  MR_HOST_DEVICE static uint16_t from_float(float value, bool saturate = false) {
    const uint32_t in = float_bits(value);
    uint32_t out = (in + 0x7fffu + ((in >> 16) & 1)) >> 16;
    if (saturate) out = (in & 0x7fffffffu) > kLargestAsFloat ? (in >> 31 << 15) | (kLargestAsFloat >> 16) : out;
    return uint16_t(is_nan_bits(in) ? kNaN : out);
  }

  MR_HOST_DEVICE static float largest() { return float_from_bits(kLargestAsFloat); }
};

// The size of an element in bytes.
MR_HOST_DEVICE constexpr uint32_t dtype_size(mr_dtype dtype) {
  switch (dtype) {
    case MR_I64:
    case MR_F64:
      return 8;
    case MR_I32:
    case MR_F32:
      return 4;
    case MR_I16:
    case MR_F16:
    case MR_BF16:
      return 2;
    default:
      return 1;
  }
}

}  // namespace mr
