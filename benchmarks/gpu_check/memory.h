// Device memory for the checks, in CUDA spelling: what goes wrong ends the program with a sentence.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

namespace gpu_check {

inline void must(int code, const char* what) {
  if (code == 0) return;
  fprintf(stderr, "gpu_check: %s failed: the GPU's runtime says error %d\n", what, code);
  exit(1);
}

using Host = std::vector<uint8_t>;

// An allocation, and `offset` bytes into it the memory that is used.
class Memory {
 public:
  explicit Memory(size_t bytes, size_t offset = 0) : bytes_(bytes), offset_(offset) {
    must(cudaMalloc(&base_, bytes + offset + 16), "allocating memory");
  }
  explicit Memory(const Host& host, size_t offset = 0) : Memory(host.size(), offset) { put(host); }
  ~Memory() { must(cudaFree(base_), "freeing memory"); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <typename T = void>
  T* at() const {
    return reinterpret_cast<T*>(static_cast<char*>(base_) + offset_);
  }
  void put(const Host& host) { must(cudaMemcpy(at(), host.data(), host.size(), cudaMemcpyHostToDevice), "copying"); }
  Host get() const {
    Host host(bytes_);
    must(cudaMemcpy(host.data(), at(), bytes_, cudaMemcpyDeviceToHost), "copying back (or a kernel before it)");
    return host;
  }

 private:
  void* base_ = nullptr;
  size_t bytes_, offset_;
};

}  // namespace gpu_check
