// torch.ops.monarch_rdma: checksums of a tensor's bytes, for the verification of transfers; see kernels.h.
//
//   checksum(Tensor x, int block_bytes) -> Tensor        int64, one for each block
#include <torch/csrc/stable/library.h>

#include <atomic>

#include "../kernels/kernels.h"
#include "tensor_bytes.h"

namespace mr::ops {
namespace {

Tensor checksum(const Tensor& x, int64_t block_bytes) {
  STD_TORCH_CHECK(block_bytes > 0 && block_bytes % 8 == 0, "block_bytes must be a positive multiple of 8, got ",
                  block_bytes);
  const TensorBytes bytes = contiguous_bytes(x, "x");
  const uint64_t block = uint64_t(block_bytes), number = (bytes.total + block - 1) / block;
  Tensor out = torch::stable::new_empty(x, {int64_t(number)}, torch::headeronly::ScalarType::Long);
  auto* sums = static_cast<uint64_t*>(out.mutable_data_ptr());
  for (uint64_t i = 0; i < number; ++i) sums[i] = kernels::checksum_start(std::min(block, bytes.total - i * block));
  // Threads may meet in a block: what each adds to it is a sum as well.
  in_ranges((bytes.total + 7) / 8, 8, [&](uint64_t first_word, uint64_t last_word) {
    const uint64_t end = std::min(last_word * 8, bytes.total);
    for (uint64_t at = first_word * 8; at < end;) {
      const uint64_t i = at / block, size = std::min(end, (i + 1) * block) - at;
      std::atomic_ref(sums[i]).fetch_add(kernels::checksum(bytes.base + at, size, (at - i * block) / 8),
                                         std::memory_order_relaxed);
      at += size;
    }
  });
  return out;
}

}  // namespace
}  // namespace mr::ops

STABLE_TORCH_LIBRARY_FRAGMENT(monarch_rdma, m) { m.def("checksum(Tensor x, int block_bytes) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(monarch_rdma, CPU, m) { m.impl("checksum", TORCH_BOX(&mr::ops::checksum)); }
