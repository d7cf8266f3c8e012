// Runs of the four fp8 formats by instructions of the processor at hand: 64 elements at a time where it looks bytes up
// in tables of 128 (AVX-512 with VBMI), 32 with AVX2. Each function returns for how many elements from the first on it
// has done it: 0 on other processors. The bits are those of float_formats.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "float_formats.h"

namespace mr::kernels {

using Fp8Shards = const uint8_t* const[4];

template <typename Format>
struct Fp8Runs {
  static size_t to_floats(const uint8_t* src, float* dst, size_t count);
  static size_t from_floats(const float* src, uint8_t* dst, size_t count);

  // ((a[i] + b[i]) + c[i]) + d[i] in fp32.
  static size_t sums_of_four(const Fp8Shards& shards, float* dst, size_t count);
  // The same times `factor`, and back. dst may be one of the shards.
  static size_t sum_of_four(const Fp8Shards& shards, float factor, uint8_t* dst, size_t count);
};

extern template struct Fp8Runs<E4M3FN>;
extern template struct Fp8Runs<E5M2>;
extern template struct Fp8Runs<E4M3FNUZ>;
extern template struct Fp8Runs<E5M2FNUZ>;

}  // namespace mr::kernels
