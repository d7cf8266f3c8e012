// The module monarch_rdma._kernels: torch.ops.monarch_rdma.* for tensors of a GPU (dispatch key CUDA, ROCm's too), on
// the current stream. The ops' checks are those of csrc/ops, compiled once more for this module; here is what they run.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <initializer_list>
#include <vector>

#include "kernels.h"
#include "ops/run.h"

#if !defined(MR_GPU_EMULATION)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#endif

namespace mr::ops {
namespace {

using Bytes = std::initializer_list<const TensorBytes*>;

// The device that all of these are on, made the current one, and its current stream.
class Gpu {
 public:
  explicit Gpu(const TensorBytes& first) : device_(first.device), guard_(first.device) {
#if !defined(MR_GPU_EMULATION)
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream_));
#endif
  }

  void check(const TensorBytes& other) const {
    STD_TORCH_CHECK(other.device == device_ || other.total == 0, "all tensors must be on one GPU, got numbers ",
                    device_, " and ", other.device);
  }
  void check(const std::vector<TensorBytes>& others) const {
    for (const TensorBytes& other : others) check(other);
  }

  // launch(args, stream), and what came of it.
  template <typename Args>
  void run(const char* name, int (*launch)(const Args*, void*), const Args& args) const {
    const int code = launch(&args, stream_);
    STD_TORCH_CHECK(code == 0, name, " could not be started on the GPU: the runtime says error ", code);
  }

  // Memory on it that is free again once the stream has come this far.
  Tensor memory(size_t bytes) const {
    return torch::stable::empty({int64_t(bytes)}, torch::headeronly::ScalarType::Byte, std::nullopt, place());
  }

 private:
#if defined(MR_GPU_EMULATION)
  struct Guard {
    explicit Guard(int32_t) {}
  };
  static torch::stable::Device place() { return torch::stable::Device(torch::headeronly::DeviceType::CPU); }
#else
  using Guard = torch::stable::accelerator::DeviceGuard;
  torch::stable::Device place() const { return {torch::headeronly::DeviceType::CUDA, device_}; }
#endif

  int32_t device_;
  Guard guard_;
  void* stream_ = nullptr;
};

mr_gpu_part part_of(const TensorBytes& bytes) {
  static_assert(int(MR_GPU_DIMS) >= int(MR_MAX_DIMS), "a box has room for every view");
  mr_gpu_part part = {};
  part.data = bytes.base;
  part.run = bytes.total ? bytes.view.run : 0;
  part.ndim = bytes.view.ndim;
  for (uint32_t d = 0; d < part.ndim; ++d) {
    part.count[d] = bytes.view.count[d];
    part.stride[d] = int64_t(bytes.view.stride[d]);
  }
  return part;
}

void run_packing(const Packing& packing, bool unpack) {
  if (packing.packed.total == 0) return;
  const Gpu gpu(packing.packed);
  gpu.check(packing.parts);
  std::vector<mr_gpu_part> parts;
  for (size_t i = 0; i < packing.parts.size(); ++i) {
    parts.push_back(part_of(packing.parts[i]));
    if (packing.cast) parts.back().dtype = packing.dtypes[i];
  }
  mr_boxes_args lay = {};
  lay.parts = parts.data();
  lay.nparts = int64_t(parts.size());
  lay.packed = packing.packed.base;
  lay.cast = packing.cast;
  lay.packed_dtype = packing.packed_dtype;
  uint32_t tiles = 0;
  const int64_t number = mr_lay_boxes(&lay, &tiles);
  STD_TORCH_CHECK(number >= 0, "the parts are too many or too large for one launch");
  std::vector<mr_gpu_box> boxes(static_cast<size_t>(number));
  lay.boxes = boxes.data();
  lay.capacity = number;
  mr_lay_boxes(&lay, &tiles);

  const Tensor memory = gpu.memory(boxes.size() * sizeof(mr_gpu_box));
  mr_pack_args args = {};
  args.host_boxes = boxes.data();
  args.boxes = static_cast<mr_gpu_box*>(memory.mutable_data_ptr());
  args.nboxes = uint32_t(number);
  args.tiles = tiles;
  args.unpack = unpack;
  args.cast = packing.cast;
  gpu.run(unpack ? "unpack" : "pack", mr_launch_pack, args);
}

// The kernels take their shards' addresses along with their arguments.
void check_few(size_t shards, const char* argument) {
  STD_TORCH_CHECK(shards <= MR_GPU_SHARDS, argument, " must be at most ", int(MR_GPU_SHARDS), " tensors on a GPU, got ",
                  shards);
}

uint32_t gpu_op(kernels::ReduceOp op) {
  switch (op) {
    case kernels::ReduceOp::sum:
      return MR_GPU_SUM;
    case kernels::ReduceOp::avg:
      return MR_GPU_AVG;
    case kernels::ReduceOp::min:
      return MR_GPU_MIN;
    case kernels::ReduceOp::max:
      return MR_GPU_MAX;
    case kernels::ReduceOp::prod:
      return MR_GPU_PROD;
  }
  return MR_GPU_SUM;
}

uint32_t gpu_kind(PeerKind kind) {
  switch (kind) {
    case PeerKind::one_shot:
      return MR_GPU_ONE_SHOT;
    case PeerKind::two_shot:
      return MR_GPU_TWO_SHOT;
    case PeerKind::reduce_scatter:
      return MR_GPU_REDUCE_SCATTER;
    case PeerKind::all_gather:
      return MR_GPU_ALL_GATHER;
  }
  return MR_GPU_ONE_SHOT;
}

const float* floats(const TensorBytes& bytes) { return reinterpret_cast<const float*>(bytes.base); }

}  // namespace

void check_place(const Tensor& tensor, const char* argument) {
#if defined(MR_GPU_EMULATION)
  STD_TORCH_CHECK(tensor.is_cpu(), argument, " must be a CPU tensor");
#else
  STD_TORCH_CHECK(tensor.is_cuda(), argument, " must be a GPU tensor");
#endif
}

void run_pack(const Packing& packing) { run_packing(packing, false); }
void run_unpack(const Packing& packing) { run_packing(packing, true); }

void run_reduce(mr_dtype dtype, kernels::ReduceOp op, const std::vector<TensorBytes>& shards, const TensorBytes& out) {
  check_few(shards.size(), "shards");
  if (out.total == 0) return;
  const Gpu gpu(out);
  gpu.check(shards);
  mr_reduce_args args = {};
  for (const TensorBytes& shard : shards) args.shard[args.shards++] = shard.base;
  args.out = out.base;
  args.count = out.total / dtype_size(dtype);
  args.dtype = dtype;
  args.op = gpu_op(op);
  gpu.run("reduce", mr_launch_reduce, args);
}

void run_quantize(mr_dtype x_dtype, const TensorBytes& x, mr_dtype q_dtype, const TensorBytes& q,
                  const TensorBytes& scales, const TensorBytes& error, uint64_t block) {
  if (q.total == 0) return;
  const Gpu gpu(x);
  for (const TensorBytes* other : Bytes{&q, &scales, &error}) gpu.check(*other);
  mr_quantize_args args = {};
  args.x = x.base;
  args.q = q.base;
  args.scales = reinterpret_cast<float*>(scales.base);
  args.error = reinterpret_cast<float*>(error.base);
  args.count = q.total;
  args.block = block;
  args.x_dtype = x_dtype;
  args.q_dtype = q_dtype;
  gpu.run("quantize", mr_launch_quantize, args);
}

void run_dequantize(mr_dtype q_dtype, const TensorBytes& q, const TensorBytes& scales, mr_dtype out_dtype,
                    const TensorBytes& out, uint64_t block) {
  if (q.total == 0) return;
  const Gpu gpu(out);
  for (const TensorBytes* other : Bytes{&q, &scales}) gpu.check(*other);
  mr_dequantize_args args = {};
  args.q[0] = q.base;
  args.scales[0] = floats(scales);
  args.shards = 1;
  args.out = out.base;
  args.count = q.total;
  args.block = block;
  args.q_dtype = q_dtype;
  args.out_dtype = out_dtype;
  gpu.run("dequantize", mr_launch_dequantize, args);
}

void run_dequantize_sum(mr_dtype q_dtype, const std::vector<TensorBytes>& qs, const std::vector<TensorBytes>& scales,
                        const TensorBytes& out, uint64_t block) {
  check_few(qs.size(), "qs");
  if (out.total == 0) return;
  const Gpu gpu(out);
  gpu.check(qs);
  gpu.check(scales);
  mr_dequantize_args args = {};
  for (size_t i = 0; i < qs.size(); ++i) {
    args.q[i] = qs[i].base;
    args.scales[i] = floats(scales[i]);
  }
  args.shards = uint32_t(qs.size());
  args.out = out.base;
  args.count = out.total / 4;
  args.block = block;
  args.q_dtype = q_dtype;
  args.out_dtype = MR_F32;
  gpu.run("dequantize_sum", mr_launch_dequantize, args);
}

void run_checksum(const TensorBytes& bytes, uint64_t block_bytes, const TensorBytes& sums) {
  if (bytes.total == 0) return;
  const Gpu gpu(bytes);
  gpu.check(sums);
  mr_checksum_args args = {};
  args.data = bytes.base;
  args.bytes = bytes.total;
  args.block_bytes = block_bytes;
  args.sums = reinterpret_cast<uint64_t*>(sums.base);
  gpu.run("checksum", mr_launch_checksum, args);
}

void run_peer_collective(const PeerCollective& call) {
  static_assert(sizeof(mr_gpu_signals) == kPeerSignalBytes && kPeerSignalBytes % 16 == 0, "data begins aligned");
  static_assert(int(MR_GPU_RANKS) == int(kMostPeers));
  const Gpu gpu(call.out);
  mr_collective_args args = {};
  for (size_t rank = 0; rank < call.workspaces.size(); ++rank) {
    args.signals[rank] = reinterpret_cast<mr_gpu_signals*>(call.workspaces[rank]);
    args.data[rank] = call.workspaces[rank] + kPeerSignalBytes;
  }
  args.out = call.out.base;
  args.stop = call.stop;
  args.count = call.count;
  args.kind = gpu_kind(call.kind);
  args.rank = call.rank;
  args.ranks = uint32_t(call.workspaces.size());
  args.dtype = call.dtype;
  args.op = gpu_op(call.op);
  gpu.run("peer_collective", mr_launch_collective, args);
}

}  // namespace mr::ops

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernels", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&module); }
