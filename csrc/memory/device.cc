#include "device.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <fstream>

namespace mr {
namespace {

constexpr int kInvalidValue = 1;  // of both runtimes

std::string hex(const void* address) {
  char out[24];
  std::snprintf(out, sizeof out, "0x%" PRIxPTR, reinterpret_cast<uintptr_t>(address));
  return out;
}

// As both runtimes lay it out; HIP has more fields behind these, CUDA 13 too.
struct PointerAttributes {
  int type;  // 0 unregistered, 1 host, 2 device, 3 managed; 11: HIP's unified
  int device;
  void* device_pointer;
  void* host_pointer;
  uint64_t room[16];
};

}  // namespace

const char* kind_name(GpuPointer::Kind kind) {
  switch (kind) {
    case GpuPointer::Kind::host:
      return "host";
    case GpuPointer::Kind::pinned:
      return "pinned";
    case GpuPointer::Kind::managed:
      return "managed";
    case GpuPointer::Kind::device:
      return "device";
  }
  return "?";
}

Gpu::Gpu(const GpuCalls& calls, bool is_hip, std::string library, std::string chosen)
    : calls(calls), is_hip(is_hip), library(std::move(library)), chosen(std::move(chosen)), version([&calls] {
        int out = 0;
        return calls.RuntimeGetVersion(&out) == 0 ? out : 0;
      }()) {}

Status Gpu::failure(int kind, const char* call, const std::string& of, int code) const {
  const char* const text = calls.GetErrorString(code);
  (void)calls.GetLastError();
  const bool has_prefix = std::string_view(call).starts_with("hip") || std::string_view(call).starts_with("cu");
  return fail(kind, (has_prefix ? ""
                     : is_hip   ? "hip"
                                : "cuda") +
                        std::string(call) + " of " + of + ": error " + std::to_string(code) +
                        (text != nullptr ? std::string(": ") + text : ""));
}

int Gpu::count() const {
  int out = 0;
  if (calls.GetDeviceCount(&out) == 0) return out;
  (void)calls.GetLastError();
  return 0;
}

std::string Gpu::pci(int device) const {
  char out[32] = {};
  if (calls.DeviceGetPCIBusId(out, sizeof out - 1, device) != 0) {
    (void)calls.GetLastError();
    return "";
  }
  std::string address = out;
  std::transform(address.begin(), address.end(), address.begin(), [](unsigned char c) { return std::tolower(c); });
  return address;
}

int Gpu::at_pci(const std::string& address) const {
  for (int device = 0; device < count(); ++device)
    if (!address.empty() && pci(device) == address) return device;
  return -1;
}

int Gpu::numa(int device) const {
  std::ifstream file("/sys/bus/pci/devices/" + pci(device) + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

bool Gpu::reaches(int device, int peer) const {
  int can = 0;
  if (device == peer) return true;
  if (calls.DeviceCanAccessPeer(&can, device, peer) == 0) return can != 0;
  (void)calls.GetLastError();
  return false;
}

GpuPointer Gpu::at(const void* address) const {
  PointerAttributes found{};
  if (const int code = calls.PointerGetAttributes(&found, address); code != 0) {
    (void)calls.GetLastError();
    if (code == kInvalidValue) return {};  // how some versions say "unknown"
    throw Error(failure(MR_REGISTRATION, "PointerGetAttributes", hex(address), code));
  }
  GpuPointer out;
  if (found.type == 0) return out;
  out.device = found.device;
  out.kind = found.type == 1   ? GpuPointer::Kind::pinned
             : found.type == 2 ? GpuPointer::Kind::device
                               : GpuPointer::Kind::managed;
  void* base = nullptr;
  size_t size = 0;
  if (calls.MemGetAddressRange(&base, &size, const_cast<void*>(address)) == 0) {
    out.base = reinterpret_cast<uintptr_t>(base);
    out.size = size;
  } else {
    (void)calls.GetLastError();
  }
  return out;
}

std::vector<GpuPointer> Gpu::pieces(const void* address, uint64_t size) const {
  std::vector<GpuPointer> out;
  const uint64_t begin = reinterpret_cast<uintptr_t>(address);
  for (uint64_t at = begin; at < begin + size;) {
    const GpuPointer piece = this->at(reinterpret_cast<const void*>(at));
    if (piece.kind != GpuPointer::Kind::device || piece.base > at || piece.base + piece.size <= at)
      throw Error(MR_REGISTRATION, hex(reinterpret_cast<const void*>(at)) +
                                       " is not memory of a device (it was freed, or never allocated)");
    out.push_back(piece);
    at = piece.base + piece.size;
  }
  return out;
}

int Gpu::demand_device(const char* argument, const void* address, uint64_t size) const {
  const std::string what =
      std::string("argument ") + argument + " = " + hex(address) + ", " + std::to_string(size) + " bytes: ";
  const GpuPointer first = at(address);
  if (first.kind != GpuPointer::Kind::device)
    throw Error(MR_REGISTRATION,
                what + "the GPU runtime (" + library + ") knows it as " + kind_name(first.kind) +
                    " memory, not as memory of a device" +
                    (first.kind == GpuPointer::Kind::host ? " (it was freed, or never allocated)" : ""));
  try {
    for (const GpuPointer& piece : pieces(address, size))
      if (piece.device != first.device)
        throw Error(MR_REGISTRATION, "it begins on device " + std::to_string(first.device) + " and goes on on device " +
                                         std::to_string(piece.device));
  } catch (const Error& error) {
    throw Error(MR_REGISTRATION, what + error.status().text);
  }
  return first.device;
}

OnDevice::OnDevice(const Gpu& gpu, int device) : gpu_(gpu) {
  int current = -1;
  if (gpu.calls.GetDevice(&current) != 0) (void)gpu.calls.GetLastError();
  if (current == device) return;
  gpu.check(gpu.calls.SetDevice(device), MR_CONFIG, "SetDevice", "device " + std::to_string(device));
  before_ = current;
}

}  // namespace mr
