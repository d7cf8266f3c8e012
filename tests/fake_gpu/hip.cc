// libamdhip64.so.7; with HIP_6, as ROCm 6 had it: no dma-buf, a descriptor is imported by its address, and here no
// waits for values either.
#define PREFIX hip
#define DRIVER hip
#ifdef HIP_6
#define WITHOUT_DMABUF
#define DESCRIPTOR_BY_ADDRESS
#endif
#include "spelled.h"
#include "virtual_memory.h"

#ifdef HIP_6
FACE(RuntimeGetVersion, int* version) { return *version = 60343483, 0; }
#else
FACE(RuntimeGetVersion, int* version) { return *version = 70253211, 0; }
FACE(StreamWaitValue32, fake::Stream* stream, void* address, uint32_t value, unsigned flags, uint32_t) {
  return fake::stream_wait_value(stream, address, value, flags);
}
#endif
FACE(MemGetAddressRange, void** base, size_t* size, void* address) { return fake::address_range(base, size, address); }
