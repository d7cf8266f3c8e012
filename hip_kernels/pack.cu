// pack and unpack: any number of strided boxes to and from one contiguous buffer, in one launch, with a cast on the
// way.
//
// A box is walked in units (1 to 16 bytes; with a cast, one or eight elements), a tile of them by each block of
// threads. boxes.cc chose the units so that both sides are aligned to them.

#include <cuda_runtime.h>

#include <type_traits>

#include "elements.cuh"

namespace mr {
namespace {

constexpr uint32_t kPerThread = 8;
constexpr uint32_t kTile = kThreads * kPerThread;  // boxes.cc's tile

// The last box that begins at or before `tile`.
__device__ __forceinline__ const mr_gpu_box& find_box(const mr_gpu_box* boxes, uint32_t nboxes, uint32_t tile) {
  uint32_t low = 0, high = nboxes;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (boxes[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return boxes[low];
}

// Where units `first`, first + kThreads... of the box lie in its tensor, in bytes from the box's first one.
template <int kCount>
__device__ __forceinline__ void find_offsets(const mr_gpu_box& box, uint32_t first, int64_t (&offset)[kCount]) {
  uint32_t unit[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    unit[i] = first + uint32_t(i) * kThreads;
    offset[i] = 0;
  }
  for (uint32_t d = 0; d < box.ndim; ++d) {
    const mr_gpu_dim dim = box.dim[d];
    const bool outermost = d + 1 == box.ndim;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t rest = outermost ? 0 : (__umulhi(unit[i], dim.multiplier) + unit[i]) >> dim.shift;
      offset[i] += int64_t(unit[i] - rest * dim.count) * dim.stride;
      unit[i] = rest;
    }
  }
}

// Copies units `first`, first + kThreads...: all loads come before all stores, so that they are under way together.
template <typename Word, bool kUnpack, int kCount>
__device__ __forceinline__ void copy_units(const mr_gpu_box& box, uint32_t first) {
  int64_t offset[kCount];
  find_offsets(box, first, offset);
  Word* const packed = reinterpret_cast<Word*>(box.packed) + first;
  Word word[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    word[i] = kUnpack ? packed[i * kThreads] : *reinterpret_cast<const Word*>(box.part + offset[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    (kUnpack ? *reinterpret_cast<Word*>(box.part + offset[i]) : packed[i * kThreads]) = word[i];
  }
}

template <typename Word, bool kUnpack>
__device__ __forceinline__ void copy_tile(const mr_gpu_box& box, uint32_t first) {
  const uint32_t mine = first + threadIdx.x;
  if (first + kTile <= box.units) return copy_units<Word, kUnpack, kPerThread>(box, mine);
  for (uint32_t unit = mine; unit < box.units; unit += kThreads) copy_units<Word, kUnpack, 1>(box, unit);
}

template <bool kUnpack>
__global__ void __launch_bounds__(kThreads) pack_bytes(const mr_gpu_box* boxes, uint32_t nboxes) {
  const mr_gpu_box& box = find_box(boxes, nboxes, blockIdx.x);
  const uint32_t first = (blockIdx.x - box.first_tile) * kTile;
  switch (box.unit) {
    case 16:
      return copy_tile<Word16, kUnpack>(box, first);
    case 8:
      return copy_tile<Word8, kUnpack>(box, first);
    case 4:
      return copy_tile<uint32_t, kUnpack>(box, first);
    case 2:
      return copy_tile<uint16_t, kUnpack>(box, first);
    default:
      return copy_tile<uint8_t, kUnpack>(box, first);
  }
}

// --- with a cast: through int64, fp32 or fp64, whichever holds the source's kind, as torch's .to() ---

template <typename Through, int kGroup>
__device__ __forceinline__ void load_as(uint32_t dtype, const char* at, Through (&value)[kGroup]) {
  with_any(dtype, [&](auto element) {
    using From = decltype(element);
    if constexpr (std::is_same_v<Wide<From>, Through>) {
      typename From::Storage stored[kGroup];
      load(at, stored);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) value[i] = Through(From::load(stored[i]));
    }
  });
}

template <typename Through, int kGroup>
__device__ __forceinline__ void cast_through(uint32_t from, const char* source, uint32_t to, char* target) {
  Through value[kGroup] = {};
  load_as(from, source, value);
  with_any(to, [&](auto element) {
    using To = decltype(element);
    typename To::Storage stored[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) stored[i] = To::store(Narrow<typename To::Value, Through>::of(value[i]));
    store(target, stored);
  });
}

template <int kGroup>
__device__ __forceinline__ void cast_tile(const mr_gpu_box& box, uint32_t first, bool unpack) {
  const uint64_t step = uint64_t(kGroup) * dtype_size(mr_dtype(box.packed_dtype));
  const uint32_t from = unpack ? box.packed_dtype : box.part_dtype;
  const uint32_t to = unpack ? box.part_dtype : box.packed_dtype;
  for (uint32_t i = 0; i < kPerThread; ++i) {
    const uint32_t unit = first + i * kThreads + threadIdx.x;
    if (unit >= box.units) return;
    int64_t offset[1];
    find_offsets(box, unit, offset);
    char* part = box.part + offset[0];
    char* packed = box.packed + unit * step;
    const char* source = unpack ? packed : part;
    char* target = unpack ? part : packed;
    if (from == MR_F64) {
      cast_through<double, kGroup>(from, source, to, target);
    } else if (from <= MR_I64 || from == MR_BOOL) {
      cast_through<int64_t, kGroup>(from, source, to, target);
    } else {
      cast_through<float, kGroup>(from, source, to, target);
    }
  }
}

__global__ void __launch_bounds__(kThreads) pack_cast(const mr_gpu_box* boxes, uint32_t nboxes, bool unpack) {
  const mr_gpu_box& box = find_box(boxes, nboxes, blockIdx.x);
  const uint32_t first = (blockIdx.x - box.first_tile) * kTile;
  if (box.unit == 8) {
    cast_tile<8>(box, first, unpack);
  } else {
    cast_tile<1>(box, first, unpack);
  }
}

}  // namespace
}  // namespace mr

extern "C" int mr_launch_pack(const mr_pack_args* args, void* stream) {
  if (args->tiles == 0) return cudaSuccess;
  const auto on = static_cast<cudaStream_t>(stream);
  const size_t bytes = args->nboxes * sizeof(mr_gpu_box);
  const cudaError_t copied = cudaMemcpyAsync(args->boxes, args->host_boxes, bytes, cudaMemcpyHostToDevice, on);
  if (copied != cudaSuccess) return copied;
  if (args->cast) {
    mr::pack_cast<<<args->tiles, mr::kThreads, 0, on>>>(args->boxes, args->nboxes, args->unpack != 0);
  } else if (args->unpack) {
    mr::pack_bytes<true><<<args->tiles, mr::kThreads, 0, on>>>(args->boxes, args->nboxes);
  } else {
    mr::pack_bytes<false><<<args->tiles, mr::kThreads, 0, on>>>(args->boxes, args->nboxes);
  }
  return cudaGetLastError();
}
