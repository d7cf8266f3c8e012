// HIP's names for CUDA's, as far as the kernels use them: nvcc compiles the hipified sources with it, so that they can
// run on an NVIDIA GPU. (HIP's own headers for NVIDIA do not go with CUDA 13.)
#pragma once

#include <cuda_runtime.h>

#define __HIP_PLATFORM_NVIDIA__ 1

#define hipError_t cudaError_t
#define hipErrorInvalidValue cudaErrorInvalidValue
#define hipEventCreate cudaEventCreate
#define hipEventDestroy cudaEventDestroy
#define hipEventElapsedTime cudaEventElapsedTime
#define hipEventRecord cudaEventRecord
#define hipEventSynchronize cudaEventSynchronize
#define hipEvent_t cudaEvent_t
#define hipFree cudaFree
#define hipGetLastError cudaGetLastError
#define hipIpcCloseMemHandle cudaIpcCloseMemHandle
#define hipIpcGetMemHandle cudaIpcGetMemHandle
#define hipIpcMemHandle_t cudaIpcMemHandle_t
#define hipIpcMemLazyEnablePeerAccess cudaIpcMemLazyEnablePeerAccess
#define hipIpcOpenMemHandle cudaIpcOpenMemHandle
#define hipMalloc cudaMalloc
#define hipMemcpy cudaMemcpy
#define hipMemcpyAsync cudaMemcpyAsync
#define hipMemcpyDeviceToDevice cudaMemcpyDeviceToDevice
#define hipMemcpyDeviceToHost cudaMemcpyDeviceToHost
#define hipMemcpyHostToDevice cudaMemcpyHostToDevice
#define hipMemset cudaMemset
#define hipMemsetAsync cudaMemsetAsync
#define hipStreamCreateWithFlags cudaStreamCreateWithFlags
#define hipStreamDestroy cudaStreamDestroy
#define hipStreamNonBlocking cudaStreamNonBlocking
#define hipStreamSynchronize cudaStreamSynchronize
#define hipStream_t cudaStream_t
#define hipSuccess cudaSuccess
