// Words in memory that several devices have mapped: written with release, read with acquire, at system scope.
#pragma once

#include "device.cuh"

namespace mr {

__device__ __forceinline__ void signal_release(uint32_t* word, uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#elif defined(__HIP_PLATFORM_AMD__) && !defined(MR_GPU_EMULATION)
  __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

__device__ __forceinline__ uint32_t signal_acquire(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#elif defined(__HIP_PLATFORM_AMD__) && !defined(MR_GPU_EMULATION)
  return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

// Between two looks at a word that another thread is to write.
__device__ __forceinline__ void pause() {
#if defined(MR_GPU_EMULATION)
  mr_emulation::yield_to_others();
#elif defined(__CUDA_ARCH__)
  __nanosleep(32);
#elif defined(__HIP_PLATFORM_AMD__)
  __builtin_amdgcn_s_sleep(1);
#endif
}

}  // namespace mr
