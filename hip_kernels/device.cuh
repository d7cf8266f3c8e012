// What every kernel needs of the device: lanes, 16-byte accesses, shared memory, and words that other devices see.
//
// The tests compile the hipified kernels for the CPU (tests/gpu_emulation, MR_GPU_EMULATION), where each thread is a
// fiber: shared memory is asked for through MR_SHARED, and a loop that waits for another thread calls pause().
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels.h"

#if !defined(MR_GPU_EMULATION)
#define MR_SHARED(type, name, count) __shared__ type name[count]
#endif

// For a template that calls what it is given, a function of the host or of the device: nvcc sees both in it.
#if defined(__NVCC__)
#define MR_CALLS_EITHER _Pragma("nv_exec_check_disable")
#else
#define MR_CALLS_EITHER
#endif

namespace mr {

constexpr int kThreads = 256;  // in a block of threads, for every kernel here
constexpr int kMaxWarps = kThreads / 32;

__device__ __forceinline__ int warp_size() {
#if defined(__HIP_PLATFORM_AMD__)
  return warpSize;
#else
  return 32;
#endif
}

__device__ __forceinline__ int lane() { return int(threadIdx.x) % warp_size(); }

// The value of the lane whose number differs in the bits of `step`. All lanes of the warp call it.
template <typename T>
__device__ __forceinline__ T exchanged(T value, int step) {
#if defined(__HIP_PLATFORM_AMD__)
  return __shfl_xor(value, step);  // the form with a mask checks it at run time, and traps
#else
  return __shfl_xor_sync(0xffffffffu, value, step);
#endif
}

// Combines the values of the `lanes` (a power of two) neighbours of a lane; all of them get the result.
template <typename T, typename Combine>
__device__ __forceinline__ T across(T value, int lanes, Combine combine) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    value = combine(value, exchanged(value, step));
  }
  return value;
}

// The same for all threads of the block, which must all call it.
template <typename T, typename Combine>
__device__ __forceinline__ T across_block(T value, Combine combine) {
  MR_SHARED(T, part, kMaxWarps);
  const int warps = kThreads / warp_size();
  value = across(value, warp_size(), combine);
  __syncthreads();  // the last call's parts have been read
  if (lane() == 0) part[int(threadIdx.x) / warp_size()] = value;
  __syncthreads();
  value = part[0];
  for (int warp = 1; warp < warps; ++warp) value = combine(value, part[warp]);
  return value;
}

// Words of the widest accesses. HIP's own classes for them are copied through memory, compilers' vectors are not.
#if defined(__NVCC__)
using Word8 = uint2;
using Word16 = uint4;
#else
typedef uint32_t Word8 __attribute__((vector_size(8)));
typedef uint32_t Word16 __attribute__((vector_size(16)));
#endif

// kBytes at `at` as an array, in accesses of up to 16 bytes: `at` is aligned to the smaller of 16 and kBytes.
template <int kBytes>
struct Aligned {
  static_assert(kBytes % 16 == 0 || kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8, "a power of two");
  using Word = typename Aligned<(kBytes > 16 ? 16 : kBytes)>::Word;
};
// clang-format off
template <> struct Aligned<1> { using Word = uint8_t; };
template <> struct Aligned<2> { using Word = uint16_t; };
template <> struct Aligned<4> { using Word = uint32_t; };
template <> struct Aligned<8> { using Word = Word8; };
template <> struct Aligned<16> { using Word = Word16; };
// clang-format on

template <typename T, int kCount>
__device__ __forceinline__ void load(const void* at, T (&out)[kCount]) {
  using Word = typename Aligned<int(sizeof out)>::Word;
  constexpr int kWords = int(sizeof(T)) * kCount / int(sizeof(Word));
  Word words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = static_cast<const Word*>(at)[i];
  __builtin_memcpy(out, words, sizeof out);
}

template <typename T, int kCount>
__device__ __forceinline__ void store(void* at, const T (&in)[kCount]) {
  using Word = typename Aligned<int(sizeof in)>::Word;
  constexpr int kWords = int(sizeof(T)) * kCount / int(sizeof(Word));
  Word words[kWords];
  __builtin_memcpy(words, in, sizeof in);
#pragma unroll
  for (int i = 0; i < kWords; ++i) static_cast<Word*>(at)[i] = words[i];
}

__host__ __device__ inline bool aligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// A product that is rounded before it is used, so that GPU and CPU have the same bits.
__device__ __forceinline__ float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  return a * b;
#endif
}

// Blocks of threads that give each thread one of `items`, as many as are useful; a kernel strides over the rest.
inline unsigned blocks_for(uint64_t items, uint64_t per_block = kThreads) {
  const uint64_t blocks = (items + per_block - 1) / per_block;
  return unsigned(blocks < (1u << 20) ? blocks : (1u << 20));
}

__device__ __forceinline__ uint64_t global_thread() { return uint64_t(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ uint64_t all_threads() { return uint64_t(gridDim.x) * kThreads; }

}  // namespace mr
