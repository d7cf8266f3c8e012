// libhsa-runtime64.so.1
#include "fake_gpu.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int hsa_init() { return fake::injected("hsa_init"); }
EXPORT int hsa_amd_portable_export_dmabuf(const void* address, size_t size, int* fd, uint64_t* offset) {
  if (const int code = fake::injected("hsa_amd_portable_export_dmabuf")) return code;
  return fake::export_dmabuf(address, size, fd, offset);
}
EXPORT int hsa_amd_portable_close_dmabuf(int) { return 0; }
