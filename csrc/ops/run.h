// What the ops do with tensors once they have checked them: on the CPU in run.cc, on a GPU in hip_kernels/module.cc.
// The files of the ops are compiled for each of the two modules, with the dispatch key that their implementations are
// for.
#pragma once

#include <string>
#include <vector>

#include "../kernels/kernels.h"
#include "tensor_bytes.h"

#if !defined(MR_OPS_KEY)  // the CPU's: this module also has the schemas
#define MR_OPS_KEY CPU
#define MR_OPS_SCHEMAS 1
#endif
#if !defined(MR_OPS_LIBRARY)
#define MR_OPS_LIBRARY monarch_rdma
#endif

namespace mr::ops {

// Strided parts, one after the other, and `packed`. With `cast`, elements are converted, else bytes are copied.
struct Packing {
  TensorBytes packed;
  std::vector<TensorBytes> parts;
  bool cast = false;
  mr_dtype packed_dtype = MR_U8;
  std::vector<mr_dtype> dtypes;  // of the parts, for a cast
};
void run_pack(const Packing& packing);
void run_unpack(const Packing& packing);

kernels::ReduceOp op_named(const std::string& name);  // "sum", ..
void run_reduce(mr_dtype dtype, kernels::ReduceOp op, const std::vector<TensorBytes>& shards, const TensorBytes& out);

// `error` may be empty.
void run_quantize(mr_dtype x_dtype, const TensorBytes& x, mr_dtype q_dtype, const TensorBytes& q,
                  const TensorBytes& scales, const TensorBytes& error, uint64_t block);
void run_dequantize(mr_dtype q_dtype, const TensorBytes& q, const TensorBytes& scales, mr_dtype out_dtype,
                    const TensorBytes& out, uint64_t block);
void run_dequantize_sum(mr_dtype q_dtype, const std::vector<TensorBytes>& qs, const std::vector<TensorBytes>& scales,
                        const TensorBytes& out, uint64_t block);

void run_checksum(const TensorBytes& bytes, uint64_t block_bytes, const TensorBytes& sums);

// Over memory that all ranks have mapped: hip_kernels/kernels.h says what lies in it.
enum class PeerKind : uint32_t { one_shot, two_shot, reduce_scatter, all_gather };
constexpr uint64_t kPeerSignalBytes = 4352;
constexpr int64_t kMostPeers = 16;
struct PeerCollective {
  PeerKind kind = PeerKind::one_shot;
  kernels::ReduceOp op = kernels::ReduceOp::sum;
  mr_dtype dtype = MR_U8;
  uint32_t rank = 0;
  std::vector<char*> workspaces;  // of all ranks
  TensorBytes out;
  uint64_t count = 0;  // elements of out (reduce_scatter), of a rank's data (all_gather), of both
  uint32_t* stop = nullptr;
};
void run_peer_collective(const PeerCollective& call);

}  // namespace mr::ops
