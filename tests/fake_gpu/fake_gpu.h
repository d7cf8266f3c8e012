// A GPU runtime whose devices are memory of this host. Device memory is a memfd that is mapped twice: where the runtime
// says that it is, nobody may touch it (a processor that does so by mistake crashes, as it would or should on a real
// device) but where FAKE_GPU_TOUCHABLE is set, for emulated kernels; the runtime's own copies go through the other
// mapping. Streams are threads: work is done later, in order.
// The libraries of both spellings (hip.cc, cuda.cc, hsa.cc) are thin faces of this one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake __attribute__((visibility("default"))) {

  // Of both runtimes.
  enum Code {
    kOk = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kNotReady = 600,
    kIllegalAddress = 700,
    kPeerAccess = 217,
    kNotSupported = 801
  };

  struct Stream;
  struct Event;
  struct IpcHandle {
    char bytes[64];
  };
  struct Attributes {
    int type, device;
    void* device_pointer;
    void* host_pointer;
  };

  // The code that a call is to end with: set by FAKE_GPU_FAIL ("IpcGetMemHandle=801,MemcpyAsync=700"), or at run time.
  int injected(const char* call);

  int device_count(int* count);
  int get_device(int* device);
  int set_device(int device);
  int pci_bus_id(char* out, int capacity, int device);
  int can_access_peer(int* can, int device, int peer);
  const char* error_string(int code);
  int last_error();

  int malloc_device(void** out, size_t size);
  int malloc_expandable(void** out, size_t size);  // of pieces of 2 MiB, as torch's expandable segments
  int free_device(void* address);
  int malloc_managed(void** out, size_t size);
  int host_register(void* address, size_t size);
  int host_unregister(void* address);
  int pointer_attributes(Attributes * out, const void* address);
  int address_range(void** base, size_t* size, void* address);

  int stream_create(Stream * *out);
  int stream_destroy(Stream * stream);
  int stream_synchronize(Stream * stream);
  int stream_wait_event(Stream * stream, Event * event);
  int stream_wait_value(Stream * stream, void* address, uint32_t value, unsigned flags);
  int event_create(Event * *out);
  int event_record(Event * event, Stream * stream);
  int event_query(Event * event);
  int event_destroy(Event * event);
  int copy_async(void* to, const void* from, size_t size, Stream* stream);
  int copy_2d_async(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                    Stream* stream);

  int ipc_get(IpcHandle * out, void* address);
  int ipc_open(void** out, const IpcHandle& handle);
  int ipc_close(void* address);
  // The dma-buf is of the whole allocation, with the offset of the address in it; where offset is null it begins at the
  // address, which is the descriptor's position.
  int export_dmabuf(const void* address, size_t size, int* fd, uint64_t* offset);

  int retain_allocation(void** handle, void* address);
  int release_allocation(void* handle);
  int export_shareable(int* fd, void* handle);
  int import_shareable(void** handle, int fd);
  int reserve(void** out, size_t size);
  int unreserve(void* address, size_t size);
  int map(void* address, size_t size, void* handle);
  int unmap(void* address, size_t size);
  int set_access(void* address, size_t size);

}  // namespace fake
