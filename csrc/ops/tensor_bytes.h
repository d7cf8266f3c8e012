// Tensors as the core sees them: bytes, views, dtype codes. What is wrong with one is said by the argument's name.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <vector>

#include "../engine.h"
#include "../kernels/float_formats.h"

namespace mr::ops {

using torch::stable::Tensor;

// A tensor's bytes: `view` is relative to `base`.
struct TensorBytes {
  char* base = nullptr;
  mr_view view = {};
  uint64_t total = 0;   // bytes in the tensor
  uint64_t extent = 0;  // bytes from base to the end of the last element
  int32_t device = -1;  // the GPU's number; -1 for the CPU

  bool overlaps(const TensorBytes& other) const {
    return total && other.total && base < other.base + other.extent && other.base < base + extent;
  }
};

// Where this module's tensors must be.
void check_place(const Tensor& tensor, const char* argument);

TensorBytes bytes_of(const Tensor& tensor, const char* argument);
TensorBytes contiguous_bytes(const Tensor& tensor, const char* argument);
mr_dtype dtype_of(const Tensor& tensor, const char* argument);

// A destination two of whose elements may share memory has no defined content.
void check_writable(const TensorBytes& bytes, const char* argument);
void check_apart(const TensorBytes& a, const char* a_argument, const TensorBytes& b, const char* b_argument);

// work(begin, end) for ranges of [0, count), by as many threads as torch uses for an operator. An item is about
// item_bytes of memory; less than a range of kRangeBytes is not worth a thread.
template <typename Work>
void in_ranges(uint64_t count, uint64_t item_bytes, const Work& work) {
  constexpr uint64_t kRangeBytes = 128 << 10;
  const uint64_t grain = std::max<uint64_t>(1, kRangeBytes / std::max<uint64_t>(1, item_bytes));
  torch::stable::parallel_for(0, int64_t(count), int64_t(grain),
                              [&](int64_t begin, int64_t end) { work(uint64_t(begin), uint64_t(end)); });
}

}  // namespace mr::ops
