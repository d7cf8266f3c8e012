// Runs of the four fp8 formats, on processors that look bytes up in tables of 128 (AVX-512 with VBMI): 64 elements at a
// time. Each function returns for how many elements from the first on it has done it: 0 on other processors. The bits
// are those of float_formats.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "float_formats.h"

namespace mr::kernels {

using Fp8Shards = const uint8_t* const[4];

size_t fp8_to_floats(mr_dtype dtype, const uint8_t* src, float* dst, size_t count);
size_t fp8_from_floats(mr_dtype dtype, const float* src, uint8_t* dst, size_t count);

// ((a[i] + b[i]) + c[i]) + d[i] in fp32.
size_t fp8_sums_of_four(mr_dtype dtype, const Fp8Shards& shards, float* dst, size_t count);
// The same times `factor`, and back.
size_t fp8_sum_of_four(mr_dtype dtype, const Fp8Shards& shards, float factor, uint8_t* dst, size_t count);

}  // namespace mr::kernels
