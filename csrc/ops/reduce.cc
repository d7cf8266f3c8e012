// torch.ops.monarch_rdma: shards of one shape to one tensor.
//
//   reduce(Tensor[] shards, Tensor(a!) out, str op)      op: sum avg min max prod; see kernels.h
#include <torch/csrc/stable/library.h>

#include <string>

#include "run.h"

namespace mr::ops {

kernels::ReduceOp op_named(const std::string& name) {
  using kernels::ReduceOp;
  if (name == "sum") return ReduceOp::sum;
  if (name == "avg") return ReduceOp::avg;
  if (name == "min") return ReduceOp::min;
  if (name == "max") return ReduceOp::max;
  if (name == "prod") return ReduceOp::prod;
  STD_TORCH_CHECK(false, "op must be sum, avg, min, max or prod, got ", name);
}

namespace {

void reduce(const std::vector<Tensor>& shards, const Tensor& out, const std::string& op_name) {
  const kernels::ReduceOp op = op_named(op_name);
  STD_TORCH_CHECK(!shards.empty(), "shards must hold at least one tensor");
  const mr_dtype dtype = dtype_of(out, "out");
  const TensorBytes to = contiguous_bytes(out, "out");
  std::vector<TensorBytes> bytes;
  for (const Tensor& shard : shards) {
    const TensorBytes from = contiguous_bytes(shard, "shards");
    STD_TORCH_CHECK(dtype_of(shard, "shards") == dtype, "shards and out must have one dtype");
    STD_TORCH_CHECK(shard.numel() == out.numel(), "shards must have as many elements as out, ", out.numel(), ", got ",
                    shard.numel());
    STD_TORCH_CHECK(from.base == to.base || !from.overlaps(to),
                    "out shares memory with a part of an element of shards");
    bytes.push_back(from);
  }
  STD_TORCH_CHECK(kernels::can_reduce(dtype, op), "op ", op_name, " is not for ", out.scalar_type());
  run_reduce(dtype, op, bytes, to);
}

}  // namespace
}  // namespace mr::ops

#if defined(MR_OPS_SCHEMAS)
STABLE_TORCH_LIBRARY_FRAGMENT(MR_OPS_LIBRARY, m) { m.def("reduce(Tensor[] shards, Tensor(a!) out, str op) -> ()"); }
#endif

STABLE_TORCH_LIBRARY_IMPL(MR_OPS_LIBRARY, MR_OPS_KEY, m) { m.impl("reduce", TORCH_BOX(&mr::ops::reduce)); }
