// reduce: k shards into one, accumulated in fp32 (fp64, integers: in their own type) in the order of the shards.

#include <cuda_runtime.h>

#include "reduction.cuh"

namespace mr {
namespace {

// Elements up to `vectors` groups of 16 bytes go by groups, the rest one by one.
template <typename Element>
__global__ void __launch_bounds__(kThreads) reduce(const mr_reduce_args args, uint64_t vectors) {
  constexpr int kCount = kVector<Element>;
  const auto shard = [&](uint32_t s) { return args.shard[s]; };
  for (uint64_t i = global_thread(); i < vectors; i += all_threads()) {
    fold_group<Element, kCount>(args.op, args.shards, shard, i * kCount, args.out);
  }
  for (uint64_t i = vectors * kCount + global_thread(); i < args.count; i += all_threads()) {
    fold_group<Element, 1>(args.op, args.shards, shard, i, args.out);
  }
}

bool all_aligned(const mr_reduce_args& args) {
  bool aligned = aligned16(args.out);
  for (uint32_t s = 0; s < args.shards; ++s) aligned = aligned && aligned16(args.shard[s]);
  return aligned;
}

}  // namespace
}  // namespace mr

extern "C" int mr_launch_reduce(const mr_reduce_args* args, void* stream) {
  if (args->shards < 1 || args->shards > MR_GPU_SHARDS || !mr::can_reduce(args->dtype, args->op)) {
    return cudaErrorInvalidValue;
  }
  if (args->count == 0) return cudaSuccess;
  mr::with_any(args->dtype, [&](auto element) {
    using Element = decltype(element);
    const uint64_t vectors = mr::all_aligned(*args) ? args->count / mr::kVector<Element> : 0;
    const unsigned blocks = mr::blocks_for(vectors ? vectors : args->count);
    mr::reduce<Element><<<blocks, mr::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*args, vectors);
  });
  return cudaGetLastError();
}
