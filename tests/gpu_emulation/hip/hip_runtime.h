// As much of HIP's language and runtime as the kernels use, for g++: see ../fibers.h.
#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cstdint>

#include "../fibers.h"

#if !defined(MR_GPU_EMULATION)
#error "compile with -DMR_GPU_EMULATION -D__HIP_PLATFORM_AMD__"
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define MR_SHARED(type, name, count)  \
  static const char name##_place = 0; \
  type* const name = mr_emulation::shared<type>(&name##_place, count)

#define threadIdx (mr_emulation::here.thread)
#define blockIdx (mr_emulation::here.block->index)
#define blockDim (mr_emulation::here.block->size)
#define gridDim (mr_emulation::here.block->grid)
#define warpSize int(mr_emulation::wave)

using hipStream_t = void*;
enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorLaunchFailure = 719 };

inline void __syncthreads() { mr_emulation::barrier(); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }

template <typename T>
T __shfl_xor(T value, int step) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = mr_emulation::shuffle(bits, mr_emulation::here.lane ^ unsigned(step));
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  const unsigned long long before = *at;
  *at = before + value;
  return before;
}

template <typename... Parameters, typename... Arguments>
void hipLaunchKernelGGL(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t, hipStream_t,
                        Arguments... arguments) {
  mr_emulation::launch(grid, block, [=] { kernel(static_cast<Parameters>(arguments)...); });
}

inline hipError_t hipGetLastError() { return hipError_t(mr_emulation::last_error()); }
// Memory is the host's, and everything has happened when a call returns.
enum hipMemcpyKind { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost = 2 };
inline hipError_t hipMalloc(void** at, size_t bytes) {
  *at = malloc(bytes);
  return hipSuccess;
}
inline hipError_t hipFree(void* at) {
  free(at);
  return hipSuccess;
}
inline hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
  if (bytes > 0) memcpy(to, from, bytes);
  return hipSuccess;
}
inline hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t) {
  return hipMemcpy(to, from, bytes, kind);
}
inline hipError_t hipMemsetAsync(void* at, int byte, size_t bytes, hipStream_t) {
  memset(at, byte, bytes);
  return hipSuccess;
}

enum { hipStreamNonBlocking = 1 };
inline hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned) {
  *stream = nullptr;
  return hipSuccess;
}
inline hipError_t hipStreamSynchronize(hipStream_t) { return hipSuccess; }
inline hipError_t hipStreamDestroy(hipStream_t) { return hipSuccess; }
