#include <cstdlib>
#include <numeric>

#include "../base/json.h"
#include "device.h"

namespace mr {
namespace {

using namespace json;

std::vector<int> ordinals(const Gpu& gpu) {
  std::vector<int> out(static_cast<size_t>(gpu.count()));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

Json of_device(const Gpu& gpu, int device) {
  std::vector<int> peers;
  for (const int peer : ordinals(gpu))
    if (peer != device && gpu.reaches(device, peer)) peers.push_back(peer);
  return object({{"device", std::to_string(device)},
                 {"pci", quoted(gpu.pci(device))},
                 {"numa", std::to_string(gpu.numa(device))},
                 {"peers", array(peers, [](int peer) { return std::to_string(peer); })}});
}

// Variables that hide devices from the runtime. It counts the visible ones from 0 on, and so do we.
Json visibility() {
  Members out;
  for (const char* name : {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"})
    if (const char* value = std::getenv(name)) out.emplace_back(name, quoted(value));
  return object(out);
}

}  // namespace

std::string describe_gpus(bool load) {
  std::string why;
  const Gpu* const gpu = Gpu::find(&why, load);
  if (gpu == nullptr) return object({{"problem", quoted(why)}, {"visible", visibility()}, {"devices", "[]"}});
  const GpuCalls& calls = gpu->calls;
  const auto has = [](auto... call) { return truth((... || (call != nullptr))); };
  return object(
      {{"runtime", quoted(gpu->is_hip ? "HIP" : "CUDA")},
       {"library", quoted(gpu->library)},
       {"version", std::to_string(gpu->version)},
       {"chosen", quoted(gpu->chosen)},
       {"problem", quoted(gpu->count() > 0 ? "" : "it finds no device")},
       {"dmabuf", has(calls.MemGetHandleForAddressRange, calls.hsa_export_dmabuf, calls.hsa_export_dmabuf_v2)},
       {"shareable_fds", has(calls.MemImportFromShareableHandle)},
       {"stream_waits", has(calls.StreamWaitValue)},
       {"visible", visibility()},
       {"devices", array(ordinals(*gpu), [&](int device) { return of_device(*gpu, device); })}});
}

}  // namespace mr
