// Runs of small floating formats (and int8) to and from fp32: the loops that other kernels are made of.
#pragma once

#include <cstddef>

#include "float_formats.h"

namespace mr::kernels {

void to_floats(mr_dtype dtype, const void* src, float* dst, size_t count);
void from_floats(mr_dtype dtype, const float* src, void* dst,
                 size_t count);  // rounded as from_float does, not saturating

// dst[i] = ((a[i] + b[i]) + c[i]) + d[i] of the shards, without a way through memory, for as many elements from the
// first on as the processor at hand has a quick way for. Returns how many.
size_t sums_of_four(mr_dtype dtype, const void* const (&shards)[4], float* dst, size_t count);

}  // namespace mr::kernels
