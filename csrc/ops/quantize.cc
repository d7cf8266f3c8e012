// torch.ops.monarch_rdma: block-scaled int8 and fp8; see kernels.h.
//
//   quantize(Tensor x, Tensor(a!) q, Tensor(b!) scales, int block, Tensor(c!)? error)
//   dequantize(Tensor q, Tensor scales, Tensor(a!) out, int block)
//   dequantize_sum(Tensor[] qs, Tensor[] scales, Tensor(a!) out, int block)
#include <torch/csrc/stable/library.h>

#include <optional>

#include "run.h"

namespace mr::ops {
namespace {

void check_block(int64_t block) {
  STD_TORCH_CHECK(block > 0 && block % 16 == 0, "block must be a positive multiple of 16, got ", block);
}

void check_float(mr_dtype dtype, const char* argument) {
  STD_TORCH_CHECK(dtype == MR_F32 || dtype == MR_F16 || dtype == MR_BF16, argument, " must be fp32, fp16 or bf16");
}

mr_dtype quantized_dtype(const Tensor& tensor, const char* argument) {
  const mr_dtype dtype = dtype_of(tensor, argument);
  STD_TORCH_CHECK(kernels::can_quantize_to(dtype), argument, " must be int8 or a float8 format, is ",
                  tensor.scalar_type());
  return dtype;
}

TensorBytes floats(const Tensor& tensor, uint64_t count, const char* argument) {
  STD_TORCH_CHECK(dtype_of(tensor, argument) == MR_F32, argument, " must be fp32");
  STD_TORCH_CHECK(uint64_t(tensor.numel()) == count, argument, " must have ", count, " elements, has ", tensor.numel());
  return contiguous_bytes(tensor, argument);
}

uint64_t number_of_blocks(const Tensor& tensor, int64_t block) {
  return (uint64_t(tensor.numel()) + uint64_t(block) - 1) / uint64_t(block);
}

void quantize(const Tensor& x, const Tensor& q, const Tensor& scales, int64_t block,
              const std::optional<Tensor>& error) {
  check_block(block);
  const mr_dtype from = dtype_of(x, "x"), to = quantized_dtype(q, "q");
  check_float(from, "x");
  const uint64_t number = number_of_blocks(x, block);
  const TensorBytes in = contiguous_bytes(x, "x"), out = contiguous_bytes(q, "q");
  STD_TORCH_CHECK(q.numel() == x.numel(), "q must have ", x.numel(), " elements, has ", q.numel());
  const TensorBytes scale = floats(scales, number, "scales");
  const TensorBytes lost = error ? floats(*error, uint64_t(x.numel()), "error") : TensorBytes();
  check_apart(out, "q", in, "x");
  check_apart(scale, "scales", in, "x");
  check_apart(scale, "scales", out, "q");
  check_apart(lost, "error", in, "x");
  check_apart(lost, "error", out, "q");
  check_apart(lost, "error", scale, "scales");
  run_quantize(from, in, to, out, scale, lost, uint64_t(block));
}

void dequantize(const Tensor& q, const Tensor& scales, const Tensor& out, int64_t block) {
  check_block(block);
  const mr_dtype from = quantized_dtype(q, "q"), to = dtype_of(out, "out");
  check_float(to, "out");
  const uint64_t number = number_of_blocks(q, block);
  const TensorBytes in = contiguous_bytes(q, "q"), values = contiguous_bytes(out, "out");
  const TensorBytes scale = floats(scales, number, "scales");
  STD_TORCH_CHECK(q.numel() == out.numel(), "out must have ", q.numel(), " elements, has ", out.numel());
  check_apart(values, "out", in, "q");
  check_apart(values, "out", scale, "scales");
  run_dequantize(from, in, scale, to, values, uint64_t(block));
}

void dequantize_sum(const std::vector<Tensor>& qs, const std::vector<Tensor>& scales, const Tensor& out,
                    int64_t block) {
  check_block(block);
  STD_TORCH_CHECK(!qs.empty(), "qs must hold at least one tensor");
  STD_TORCH_CHECK(qs.size() == scales.size(), "qs and scales must be as many, got ", qs.size(), " and ", scales.size());
  const uint64_t number = number_of_blocks(out, block);
  const TensorBytes sum = floats(out, uint64_t(out.numel()), "out");
  const mr_dtype dtype = quantized_dtype(qs[0], "qs");
  std::vector<TensorBytes> q_bytes, scale_bytes;
  for (size_t i = 0; i < qs.size(); ++i) {
    STD_TORCH_CHECK(quantized_dtype(qs[i], "qs") == dtype, "qs must have one dtype");
    STD_TORCH_CHECK(qs[i].numel() == out.numel(), "qs must have as many elements as out, ", out.numel(), ", got ",
                    qs[i].numel());
    const TensorBytes q = contiguous_bytes(qs[i], "qs"), scale = floats(scales[i], number, "scales");
    check_apart(sum, "out", q, "an element of qs");
    check_apart(sum, "out", scale, "an element of scales");
    q_bytes.push_back(q);
    scale_bytes.push_back(scale);
  }
  run_dequantize_sum(dtype, q_bytes, scale_bytes, sum, uint64_t(block));
}

}  // namespace
}  // namespace mr::ops

#if defined(MR_OPS_SCHEMAS)
STABLE_TORCH_LIBRARY_FRAGMENT(MR_OPS_LIBRARY, m) {
  m.def("quantize(Tensor x, Tensor(a!) q, Tensor(b!) scales, int block, Tensor(c!)? error) -> ()");
  m.def("dequantize(Tensor q, Tensor scales, Tensor(a!) out, int block) -> ()");
  m.def("dequantize_sum(Tensor[] qs, Tensor[] scales, Tensor(a!) out, int block) -> ()");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(MR_OPS_LIBRARY, MR_OPS_KEY, m) {
  m.impl("quantize", TORCH_BOX(&mr::ops::quantize));
  m.impl("dequantize", TORCH_BOX(&mr::ops::dequantize));
  m.impl("dequantize_sum", TORCH_BOX(&mr::ops::dequantize_sum));
}
