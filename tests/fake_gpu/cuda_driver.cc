// libcuda.so.1
#define DRIVER cu
#include "virtual_memory.h"

DRIVER_FACE(MemGetAddressRange_v2, void** base, size_t* size, void* address) {
  return fake::address_range(base, size, address);
}
DRIVER_FACE(StreamWaitValue32_v2, fake::Stream* stream, void* address, uint32_t value, unsigned flags) {
  return fake::stream_wait_value(stream, address, value, flags);
}
