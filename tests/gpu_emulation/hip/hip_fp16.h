#pragma once

#include <cstdint>

struct __half {
  uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half half) { return half.bits; }

inline float __half2float(__half half) {
  _Float16 value;
  __builtin_memcpy(&value, &half.bits, 2);
  return value;
}

inline __half __float2half_rn(float value) {
  const _Float16 rounded = static_cast<_Float16>(value);
  __half half;
  __builtin_memcpy(&half.bits, &rounded, 2);
  return half;
}
