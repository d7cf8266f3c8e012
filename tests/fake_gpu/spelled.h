// The functions that HIP and the CUDA runtime spell alike behind their prefix: PREFIX is defined where this is
// included.
#include "fake_gpu.h"

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define FACE(name, ...) extern "C" __attribute__((visibility("default"))) int JOIN(PREFIX, name)(__VA_ARGS__)

#define TEXT2(name) #name
#define TEXT(name) TEXT2(name)
FACE(GetDeviceCount, int* count) {
  if (const int code = fake::injected(TEXT(JOIN(PREFIX, GetDeviceCount)))) return code;
  return fake::device_count(count);
}
FACE(GetDevice, int* device) { return fake::get_device(device); }
FACE(SetDevice, int device) { return fake::set_device(device); }
FACE(DeviceGetPCIBusId, char* out, int capacity, int device) { return fake::pci_bus_id(out, capacity, device); }
FACE(DeviceCanAccessPeer, int* can, int device, int peer) { return fake::can_access_peer(can, device, peer); }
FACE(GetLastError, ) { return fake::last_error(); }
extern "C" __attribute__((visibility("default"))) const char* JOIN(PREFIX, GetErrorString)(int code) {
  return fake::error_string(code);
}
FACE(PointerGetAttributes, fake::Attributes* out, const void* address) {
  return fake::pointer_attributes(out, address);
}
FACE(StreamCreateWithFlags, fake::Stream** out, unsigned) { return fake::stream_create(out); }
FACE(StreamDestroy, fake::Stream* stream) { return fake::stream_destroy(stream); }
FACE(StreamSynchronize, fake::Stream* stream) { return fake::stream_synchronize(stream); }
FACE(StreamWaitEvent, fake::Stream* stream, fake::Event* event, unsigned) {
  return fake::stream_wait_event(stream, event);
}
FACE(EventCreateWithFlags, fake::Event** out, unsigned) { return fake::event_create(out); }
FACE(EventRecord, fake::Event* event, fake::Stream* stream) { return fake::event_record(event, stream); }
FACE(EventQuery, fake::Event* event) { return fake::event_query(event); }
FACE(EventDestroy, fake::Event* event) { return fake::event_destroy(event); }
FACE(MemcpyAsync, void* to, const void* from, size_t size, int, fake::Stream* stream) {
  return fake::copy_async(to, from, size, stream);
}
FACE(Memcpy2DAsync, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int,
     fake::Stream* stream) {
  return fake::copy_2d_async(to, to_pitch, from, from_pitch, width, height, stream);
}
FACE(HostRegister, void* address, size_t size, unsigned) { return fake::host_register(address, size); }
FACE(HostUnregister, void* address) { return fake::host_unregister(address); }
FACE(HostGetDevicePointer, void** out, void* address, unsigned) { return *out = address, 0; }
FACE(IpcGetMemHandle, fake::IpcHandle* handle, void* address) { return fake::ipc_get(handle, address); }
FACE(IpcOpenMemHandle, void** out, fake::IpcHandle handle, unsigned) { return fake::ipc_open(out, handle); }
FACE(IpcCloseMemHandle, void* address) { return fake::ipc_close(address); }
