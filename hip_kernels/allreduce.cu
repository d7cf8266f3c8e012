// all-reduce, reduce-scatter and all-gather over memory that all ranks have mapped.
//
//   one-shot        every rank folds everything itself: one exchange, k times the reading; for small data
//   two-shot        every rank folds its slice, in place, then collects the others' slices
//   reduce-scatter  the first half of it, all-gather the second
//
// Every element is folded by one formula, from rank 0 up, so all ranks have the same bits. Block b of a rank works on
// the same elements of every slice as block b of the others, so only those meet: a rank's block tells the others'
// with a round number in their signals. At most MR_GPU_BLOCKS blocks: few enough to run all at once, so that none waits
// for one that has no place to run.

#include <cuda_runtime.h>

#include "reduction.cuh"
#include "signals.cuh"

namespace mr {
namespace {

// Elements that a thread handles at once: 16 bytes, of one-byte elements 8 (for more, scalar registers would not do).
template <typename Element>
constexpr int kGroup = kVector<Element> < 8 ? kVector<Element> : 8;

// Meets the same block of all ranks; before it all memory that was written becomes visible to them, after it theirs.
// False, for all threads of the block, once *stop is set: then nothing that was to come is done.
__device__ bool meet(const mr_collective_args& args, uint32_t round) {
  MR_SHARED(uint32_t, stopped, 1);
  if (threadIdx.x == 0) stopped[0] = 0;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < args.ranks) {
    const uint32_t peer = threadIdx.x;
    signal_release(&args.signals[peer]->arrived[blockIdx.x][args.rank], round);
    const uint32_t* arrived = &args.signals[args.rank]->arrived[blockIdx.x][peer];
    uint64_t looked = 0;
    // A rank may be one round ahead already; the numbers may have wrapped around.
    while (int32_t(signal_acquire(arrived) - round) < 0) {
      if (args.patience != 0 && ++looked >= args.patience) signal_release(args.stop, 1);
      if (signal_acquire(args.stop) != 0) {
        stopped[0] = 1;
        break;
      }
      pause();
    }
  }
  __syncthreads();
  const bool go_on = stopped[0] == 0;
  __syncthreads();  // before the next meeting clears it
  return go_on;
}

// Elements begin.. of a slice of `count`, by groups where `wide`, this block's share of them.
template <int kCount, typename Group, typename One>
__device__ __forceinline__ void for_share(uint64_t count, bool wide, Group group, One one) {
  const uint64_t vectors = wide ? count / kCount : 0;
  for (uint64_t i = global_thread(); i < vectors; i += all_threads()) group(i * kCount);
  for (uint64_t i = vectors * kCount + global_thread(); i < count; i += all_threads()) one(i);
}

// Folds `count` elements of all ranks' data, `skip` elements into it, into `target`.
template <typename Element>
__device__ __forceinline__ void fold_slice(const mr_collective_args& args, uint64_t skip, uint64_t count,
                                           void* target) {
  using Storage = typename Element::Storage;
  const auto shard = [&](uint32_t rank) { return static_cast<const Storage*>(args.data[rank]) + skip; };
  const bool wide = aligned16(target) && skip % kGroup<Element> == 0;
  for_share<kGroup<Element>>(
      count, wide, [&](uint64_t at) { fold_group<Element, kGroup<Element>>(args.op, args.ranks, shard, at, target); },
      [&](uint64_t at) { fold_group<Element, 1>(args.op, args.ranks, shard, at, target); });
}

// Copies `count` elements between places of which all or none are aligned.
template <typename Element>
__device__ __forceinline__ void copy_slice(const void* source, void* target, uint64_t count) {
  using Storage = typename Element::Storage;
  constexpr int kCount = kGroup<Element>;
  const Storage* from = static_cast<const Storage*>(source);
  Storage* to = static_cast<Storage*>(target);
  if (from == to) return;
  for_share<kCount>(
      count, aligned16(from) && aligned16(to),
      [&](uint64_t at) {
        Storage stored[kCount];
        load(from + at, stored);
        store(to + at, stored);
      },
      [&](uint64_t at) { to[at] = from[at]; });
}

// The slices' begins: `slice` elements each, the last ones shorter or empty.
__device__ __forceinline__ uint64_t begin_of(uint32_t rank, uint64_t slice, uint64_t count) {
  const uint64_t begin = rank * slice;
  return begin < count ? begin : count;
}

// Every rank's slice to its place in `out`. After an all-reduce they lie at their places, else at the begin of the
// data.
template <typename Element>
__device__ __forceinline__ void gather(const mr_collective_args& args, uint64_t slice, uint64_t count) {
  using Storage = typename Element::Storage;
  for (uint32_t i = 0; i < args.ranks; ++i) {
    const uint32_t rank = (args.rank + i) % args.ranks;  // not all from the same one at once
    const uint64_t begin = begin_of(rank, slice, count), end = begin_of(rank + 1, slice, count);
    const uint64_t skip = args.kind == MR_GPU_ALL_GATHER ? 0 : begin;
    copy_slice<Element>(static_cast<const Storage*>(args.data[rank]) + skip, static_cast<Storage*>(args.out) + begin,
                        end - begin);
  }
}

// What this rank folds, to where: one-shot everything, else its slice; two-shot in place.
template <typename Element>
__device__ __forceinline__ void fold_mine(const mr_collective_args& args, uint64_t slice, uint64_t count) {
  const bool all = args.kind == MR_GPU_ONE_SHOT;
  const uint64_t begin = all ? 0 : begin_of(args.rank, slice, count);
  const uint64_t end = all ? count : begin_of(args.rank + 1, slice, count);
  auto* place = static_cast<typename Element::Storage*>(args.data[args.rank]) + begin;
  fold_slice<Element>(args, begin, end - begin, args.kind == MR_GPU_TWO_SHOT ? static_cast<void*>(place) : args.out);
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) collective(const mr_collective_args args, uint64_t slice, uint64_t count) {
  uint32_t* last_round = &args.signals[args.rank]->round[blockIdx.x];
  uint32_t round = *last_round;
  if (!meet(args, ++round)) return;  // all data is there
  if (args.kind != MR_GPU_ALL_GATHER) {
    fold_mine<Element>(args, slice, count);
    if (args.kind == MR_GPU_TWO_SHOT && !meet(args, ++round)) return;  // all slices are folded
  }
  if (args.kind == MR_GPU_TWO_SHOT || args.kind == MR_GPU_ALL_GATHER) gather<Element>(args, slice, count);
  if (!meet(args, ++round)) return;  // all have read: the data may be written again
  if (threadIdx.x == 0) *last_round = round;
}

bool valid(const mr_collective_args& args) {
  if (args.ranks < 1 || args.ranks > MR_GPU_RANKS || args.rank >= args.ranks || args.kind > MR_GPU_ALL_GATHER)
    return false;
  if (args.blocks > MR_GPU_BLOCKS || args.stop == nullptr) return false;
  for (uint32_t rank = 0; rank < args.ranks; ++rank) {
    if (args.signals[rank] == nullptr || !aligned16(args.data[rank])) return false;
  }
  // Folding and collecting must split a slice among blocks in the same way: by groups.
  if (!aligned16(args.out)) return false;
  // While a rank folds everything, the others still read its data.
  if (args.out == args.data[args.rank] && args.kind != MR_GPU_TWO_SHOT) return false;
  return args.kind == MR_GPU_ALL_GATHER ? args.dtype < MR_NUM_DTYPES : can_reduce(args.dtype, args.op);
}

}  // namespace
}  // namespace mr

extern "C" int mr_launch_collective(const mr_collective_args* args, void* stream) {
  if (!mr::valid(*args)) return cudaErrorInvalidValue;
  mr::with_any(args->dtype, [&](auto element) {
    using Element = decltype(element);
    constexpr uint64_t kCount = mr::kVector<Element>;
    const uint32_t ranks = args->ranks;
    uint64_t slice = args->count, count = args->count;
    if (args->kind == MR_GPU_REDUCE_SCATTER || args->kind == MR_GPU_ALL_GATHER) {
      count *= ranks;
    } else {
      slice = (slice + ranks - 1) / ranks;
      slice = (slice + kCount - 1) / kCount * kCount;
    }
    // Enough threads for the larger of the phases; a rank that has nothing to do still meets the others.
    const uint64_t share = args->kind == MR_GPU_ONE_SHOT ? count : slice;
    unsigned blocks = args->blocks ? args->blocks : mr::blocks_for(share / kCount + 1);
    if (blocks > MR_GPU_BLOCKS) blocks = MR_GPU_BLOCKS;
    mr::collective<Element><<<blocks, mr::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*args, slice, count);
  });
  return cudaGetLastError();
}
