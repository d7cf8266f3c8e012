// Memory of GPUs, without any header of theirs: the process's own HIP or CUDA runtime, found among the libraries that
// are loaded, and what is asked of it. Everything here may be called by any thread, and leaves the thread's current
// device as it was. See docs/gpu-memory.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../base/error.h"
#include "../base/fd.h"

namespace mr {

// A stream (queue of work) and an event of the runtime.
using GpuStream = struct GpuStreamTag*;
using GpuEvent = struct GpuEventTag*;

struct GpuIpcHandle {
  char bytes[64];
};

// Functions of the runtime, named as both spell them behind their prefix. Those that are not marked "or null" are
// there. All return 0 for success.
struct GpuCalls {
  int (*GetDeviceCount)(int* count);
  int (*GetDevice)(int* device);
  int (*SetDevice)(int device);
  int (*DeviceGetPCIBusId)(char* out, int capacity, int device);
  int (*DeviceCanAccessPeer)(int* can, int device, int peer);
  int (*RuntimeGetVersion)(int* version);
  const char* (*GetErrorString)(int code);
  int (*GetLastError)();  // and forgets it
  int (*PointerGetAttributes)(void* attributes, const void* address);
  int (*StreamCreateWithFlags)(GpuStream* stream, unsigned flags);
  int (*StreamDestroy)(GpuStream stream);
  int (*StreamSynchronize)(GpuStream stream);
  int (*StreamWaitEvent)(GpuStream stream, GpuEvent event, unsigned flags);
  int (*EventCreateWithFlags)(GpuEvent* event, unsigned flags);
  int (*EventRecord)(GpuEvent event, GpuStream stream);
  int (*EventQuery)(GpuEvent event);
  int (*EventDestroy)(GpuEvent event);
  int (*MemcpyAsync)(void* to, const void* from, size_t size, int kind, GpuStream stream);
  int (*Memcpy2DAsync)(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                       int kind, GpuStream stream);
  int (*HostRegister)(void* address, size_t size, unsigned flags);
  int (*HostUnregister)(void* address);
  int (*HostGetDevicePointer)(void** out, void* address, unsigned flags);
  int (*IpcGetMemHandle)(GpuIpcHandle* handle, void* address);
  int (*IpcOpenMemHandle)(void** address, GpuIpcHandle handle, unsigned flags);
  int (*IpcCloseMemHandle)(void* address);
  // From here on: of the driver, where the runtime is CUDA's.
  int (*MemGetAddressRange)(void** base, size_t* size, void* address);
  int (*StreamWaitValue)(GpuStream stream, void* address, uint32_t value, unsigned flags, uint32_t mask);  // or null
  int (*MemGetHandleForAddressRange)(void* handle, void* address, size_t size, int type,
                                     unsigned long long flags);    // or null
  int (*MemRetainAllocationHandle)(void** handle, void* address);  // or null, as those below
  int (*MemExportToShareableHandle)(void* out, void* handle, int type, uint64_t flags);
  int (*MemImportFromShareableHandle)(void** handle, void* shared, int type);
  int (*MemAddressReserve)(void** address, size_t size, size_t alignment, void* wish, uint64_t flags);
  int (*MemAddressFree)(void* address, size_t size);
  int (*MemMap)(void* address, size_t size, size_t offset, void* handle, uint64_t flags);
  int (*MemUnmap)(void* address, size_t size);
  int (*MemSetAccess)(void* address, size_t size, const void* rights, size_t count);
  int (*MemRelease)(void* handle);
  // Of HSA, below HIP; or null.
  int (*hsa_init)();
  int (*hsa_export_dmabuf)(const void* address, size_t size, int* fd, uint64_t* offset);
  int (*hsa_export_dmabuf_v2)(const void* address, size_t size, int* fd, uint64_t* offset, uint64_t flags);
};

// What is behind an address.
struct GpuPointer {
  enum class Kind { host, pinned, managed, device };
  Kind kind = Kind::host;
  int device = -1;              // as this process's runtime counts those that are visible; -1 for host
  uint64_t base = 0, size = 0;  // of its allocation, or of its piece of an expandable one; 0 for host
};
const char* kind_name(GpuPointer::Kind kind);

// A dma-buf, and where in it the memory begins.
struct DmaBuf {
  Fd fd;
  uint64_t offset = 0;
};

class Gpu {
 public:
  // The runtime of this process; it is looked for until it is found. `load`: also where nothing has loaded one yet.
  // Null with *why: there is none, or two that can't be told apart.
  static const Gpu* find(std::string* why, bool load = false);
  // The same, or throws MR_CONFIG: `what` is what it is needed for.
  static const Gpu& need(const std::string& what);

  const GpuCalls calls;
  const bool is_hip;
  const std::string library;  // path or name of the runtime
  const std::string chosen;   // why this one, where there was a choice; else ""
  const int version;          // as the runtime tells it

  int count() const;                             // devices that are visible; 0 where it can't be told
  std::string pci(int device) const;             // "0000:c1:00.0"; "" where it can't be told
  int at_pci(const std::string& address) const;  // ordinal of the device there; -1: not visible here
  int numa(int device) const;                    // node; -1 where the kernel shows none
  bool reaches(int device, int peer) const;

  GpuPointer at(const void* address) const;
  // The range is memory of one device, all of it allocated: its device. Throws MR_REGISTRATION naming `argument`.
  int demand_device(const char* argument, const void* address, uint64_t size) const;
  // The pieces of the range's allocations, each with base and size.
  std::vector<GpuPointer> pieces(const void* address, uint64_t size) const;

  // Throws MR_REGISTRATION, which says what was tried. The range is one allocation's.
  DmaBuf export_dmabuf(const void* address, uint64_t size) const;

  // "hipIpcOpenMemHandle of 4096 bytes: error 17: invalid device pointer". Forgets the runtime's last error.
  Status failure(int kind, const char* call, const std::string& of, int code) const;
  void check(int code, int kind, const char* call, const std::string& of) const {
    if (code != 0) throw Error(failure(kind, call, of, code));
  }

  Gpu(const GpuCalls& calls, bool is_hip, std::string library, std::string chosen);

 private:
  DmaBuf export_by_runtime(const void* address, uint64_t size, std::string* tried) const;
  DmaBuf export_by_hsa(const void* address, uint64_t size, std::string* tried) const;
};

// The thread's current device while it lives.
class OnDevice {
 public:
  OnDevice(const Gpu& gpu, int device);  // throws MR_CONFIG
  ~OnDevice() {
    if (before_ >= 0) (void)gpu_.calls.SetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const Gpu& gpu_;
  int before_ = -1;  // -1: nothing to go back to
};

// GPU runtimes in this process, their devices and what each can do, as a JSON object. `load`: loads a runtime where
// none is; with it come contexts on devices: not in a process that others need.
std::string describe_gpus(bool load);

}  // namespace mr
