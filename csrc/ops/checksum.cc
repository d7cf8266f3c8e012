// torch.ops.monarch_rdma: checksums of a tensor's bytes, for the verification of transfers; see kernels.h.
//
//   checksum(Tensor x, int block_bytes) -> Tensor        int64, one for each block
#include <torch/csrc/stable/library.h>

#include "run.h"

namespace mr::ops {
namespace {

Tensor checksum(const Tensor& x, int64_t block_bytes) {
  STD_TORCH_CHECK(block_bytes > 0 && block_bytes % 8 == 0, "block_bytes must be a positive multiple of 8, got ",
                  block_bytes);
  const TensorBytes bytes = contiguous_bytes(x, "x");
  const uint64_t block = uint64_t(block_bytes), number = (bytes.total + block - 1) / block;
  Tensor out = torch::stable::new_empty(x, {int64_t(number)}, torch::headeronly::ScalarType::Long);
  run_checksum(bytes, block, contiguous_bytes(out, "the result"));
  return out;
}

}  // namespace
}  // namespace mr::ops

#if defined(MR_OPS_SCHEMAS)
STABLE_TORCH_LIBRARY_FRAGMENT(MR_OPS_LIBRARY, m) { m.def("checksum(Tensor x, int block_bytes) -> Tensor"); }
#endif

STABLE_TORCH_LIBRARY_IMPL(MR_OPS_LIBRARY, MR_OPS_KEY, m) { m.impl("checksum", TORCH_BOX(&mr::ops::checksum)); }
