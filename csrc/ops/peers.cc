// torch.ops.monarch_rdma: collectives of GPUs over memory that all ranks have mapped; see hip_kernels/allreduce.cu.
//
//   peer_collective(Tensor(a!) workspace, Tensor(b!) out, Tensor(c!) stop, int[] peers, int rank, str kind, str op)
//       Every rank has a workspace: kPeerSignalBytes of signals, zeros at first, and its data. `peers` are the
//       addresses of all of them as this rank's GPU reaches them, its own included. kind: one_shot two_shot
//       reduce_scatter all_gather; op: as of reduce. `stop`: a zero, int32 in memory that host and GPU reach; the host
//       sets it to end the waiting for ranks that will not come.
#include <torch/csrc/stable/library.h>

#include <string>

#include "run.h"

namespace mr::ops {
namespace {

PeerKind kind_named(const std::string& name) {
  if (name == "one_shot") return PeerKind::one_shot;
  if (name == "two_shot") return PeerKind::two_shot;
  if (name == "reduce_scatter") return PeerKind::reduce_scatter;
  if (name == "all_gather") return PeerKind::all_gather;
  STD_TORCH_CHECK(false, "kind must be one_shot, two_shot, reduce_scatter or all_gather, got ", name);
}

void peer_collective(const Tensor& workspace, const Tensor& out, const Tensor& stop, const std::vector<int64_t>& peers,
                     int64_t rank, const std::string& kind, const std::string& op) {
  const int64_t ranks = int64_t(peers.size());
  STD_TORCH_CHECK(ranks >= 1 && ranks <= kMostPeers, "peers must be 1 to ", kMostPeers, " addresses, got ", ranks);
  STD_TORCH_CHECK(rank >= 0 && rank < ranks, "rank must be from 0 to ", ranks - 1, ", got ", rank);
  PeerCollective call;
  call.kind = kind_named(kind);
  call.op = op_named(op);
  call.rank = uint32_t(rank);
  const TensorBytes memory = contiguous_bytes(workspace, "workspace");
  call.out = contiguous_bytes(out, "out");
  call.dtype = dtype_of(out, "out");
  call.count = uint64_t(out.numel());
  uint64_t data_bytes = call.out.total;
  if (call.kind == PeerKind::all_gather) {
    STD_TORCH_CHECK(out.numel() % ranks == 0, "out must have elements for each of ", ranks, " ranks, got ",
                    out.numel());
    call.count /= uint64_t(ranks);
    data_bytes /= uint64_t(ranks);
  } else {
    STD_TORCH_CHECK(kernels::can_reduce(call.dtype, call.op), "op ", op, " is not for ", out.scalar_type());
    if (call.kind == PeerKind::reduce_scatter) data_bytes *= uint64_t(ranks);
  }
  STD_TORCH_CHECK(memory.total >= kPeerSignalBytes && memory.total - kPeerSignalBytes >= data_bytes,
                  "workspace must have ", kPeerSignalBytes, " bytes of signals and ", data_bytes, " of data, got ",
                  memory.total);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(call.out.base) % 16 == 0, "out must begin at a multiple of 16 bytes");
  check_apart(call.out, "out", memory, "workspace");
  for (const int64_t address : peers) {
    STD_TORCH_CHECK(address != 0 && address % 16 == 0, "peers must be addresses, multiples of 16, got ", address);
    call.workspaces.push_back(reinterpret_cast<char*>(uintptr_t(address)));
  }
  STD_TORCH_CHECK(call.workspaces[call.rank] == memory.base, "peers[rank] must be the address of workspace");
  STD_TORCH_CHECK(stop.scalar_type() == torch::headeronly::ScalarType::Int && stop.numel() == 1,
                  "stop must be one int32");
  call.stop = static_cast<uint32_t*>(stop.mutable_data_ptr());
  run_peer_collective(call);
}

}  // namespace
}  // namespace mr::ops

#if defined(MR_OPS_SCHEMAS)
STABLE_TORCH_LIBRARY_FRAGMENT(MR_OPS_LIBRARY, m) {
  m.def(
      "peer_collective(Tensor(a!) workspace, Tensor(b!) out, Tensor(c!) stop, int[] peers, int rank, str kind, "
      "str op) -> ()");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(MR_OPS_LIBRARY, MR_OPS_KEY, m) {
  m.impl("peer_collective", TORCH_BOX(&mr::ops::peer_collective));
}
