// The functions that HIP and the CUDA driver spell alike behind their prefix: DRIVER is defined where this is included.
#include "fake_gpu.h"

#define DRIVER_JOIN2(a, b) a##b
#define DRIVER_JOIN(a, b) DRIVER_JOIN2(a, b)
#define DRIVER_FACE(name, ...) \
  extern "C" __attribute__((visibility("default"))) int DRIVER_JOIN(DRIVER, name)(__VA_ARGS__)

#ifndef WITHOUT_DMABUF
DRIVER_FACE(MemGetHandleForAddressRange, int* fd, void* address, size_t size, int type, unsigned long long) {
  if (const int code = fake::injected("MemGetHandleForAddressRange")) return code;
  if (type != 1 || (reinterpret_cast<uintptr_t>(address) | size) % 4096 != 0) return fake::kInvalidValue;
  return fake::export_dmabuf(address, size, fd, nullptr);
}
#endif
DRIVER_FACE(MemRetainAllocationHandle, void** handle, void* address) {
  return fake::retain_allocation(handle, address);
}
DRIVER_FACE(MemExportToShareableHandle, int* fd, void* handle, int, unsigned long long) {
  return fake::export_shareable(fd, handle);
}
DRIVER_FACE(MemImportFromShareableHandle, void** handle, void* shared, int) {
#ifdef DESCRIPTOR_BY_ADDRESS
  return fake::import_shareable(handle, *static_cast<int*>(shared));
#else
  return fake::import_shareable(handle, static_cast<int>(reinterpret_cast<intptr_t>(shared)));
#endif
}
DRIVER_FACE(MemAddressReserve, void** out, size_t size, size_t, void*, unsigned long long) {
  return fake::reserve(out, size);
}
DRIVER_FACE(MemAddressFree, void* address, size_t size) { return fake::unreserve(address, size); }
DRIVER_FACE(MemMap, void* address, size_t size, size_t, void* handle, unsigned long long) {
  return fake::map(address, size, handle);
}
DRIVER_FACE(MemUnmap, void* address, size_t size) { return fake::unmap(address, size); }
DRIVER_FACE(MemSetAccess, void* address, size_t size, const void*, size_t) { return fake::set_access(address, size); }
DRIVER_FACE(MemRelease, void* handle) { return fake::release_allocation(handle); }
