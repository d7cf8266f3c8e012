// Which runtime this process uses: a pointer of one means nothing to another, so it is the one that is loaded already
// (torch brings its own), never a second one.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <mutex>
#include <string_view>

#include "device.h"

namespace mr {
namespace {

struct Brand {
  bool is_hip;
  const char* name;
  const char* prefix;    // of its functions
  const char* file;      // how the names of its library begin
  const char* names[4];  // tried where none is loaded, newest first
};
// libamdhip64.so.5 and older describe pointers in another way.
constexpr Brand kBrands[] = {
    {true, "HIP", "hip", "libamdhip64.so", {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", nullptr}},
    {false, "CUDA", "cuda", "libcudart.so", {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", nullptr}},
};

std::string_view file_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

// Paths of the loaded libraries whose file name begins so. Some wheels put a hash into the name: libcudart-1b2c.so.12.
std::vector<std::string> loaded(std::string_view file) {
  struct Search {
    std::string_view stem;
    std::vector<std::string> found;
  } search{file.substr(0, file.find('.')), {}};
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* context) {
        auto& wanted = *static_cast<Search*>(context);
        const std::string_view name = file_name(info->dlpi_name);
        const bool same = name.starts_with(wanted.stem) && name.size() > wanted.stem.size() &&
                          (name[wanted.stem.size()] == '.' || name[wanted.stem.size()] == '-');
        if (same && name.find(".so") != std::string_view::npos) wanted.found.emplace_back(info->dlpi_name);
        return 0;
      },
      &search);
  return search.found;
}

// Fills a table, and notes the first function that is missed.
class Loader {
 public:
  Loader(const Brand& brand, void* runtime, void* driver) : brand_(brand), runtime_(runtime), driver_(driver) {}

  template <typename Call>
  void need(Call& call, const char* name) {
    const std::string whole = std::string(brand_.prefix) + name;
    if (!find(call, runtime_, whole.c_str()) && missing_.empty()) missing_ = whole;
  }
  // hip: behind "hip"; cuda: whole, of the driver.
  template <typename Call>
  void driver(Call& call, const char* hip, const char* cuda) {
    brand_.is_hip ? find(call, runtime_, hip) : find(call, driver_, cuda);
  }
  template <typename Call>
  static bool find(Call& call, void* library, const char* name) {
    call = library == nullptr ? nullptr : reinterpret_cast<Call>(::dlsym(library, name));
    return call != nullptr;
  }
  const std::string& missing() const { return missing_; }

 private:
  const Brand& brand_;
  void* const runtime_;
  void* const driver_;
  std::string missing_;
};

// A library below the runtime: there is one in a process, which the runtime has loaded, or loads.
void* open_below(const char* name) {
  void* const there = ::dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  return there != nullptr ? there : ::dlopen(name, RTLD_NOW);
}

// cuStreamWaitValue32 has no mask.
int (*cuda_wait_value)(GpuStream, void*, uint32_t, unsigned);
int wait_value_unmasked(GpuStream stream, void* address, uint32_t value, unsigned flags, uint32_t) {
  return cuda_wait_value(stream, address, value, flags);
}

#define NEED(name) loader.need(calls.name, #name)
#define DRIVER(name) loader.driver(calls.name, "hip" #name, "cu" #name)

std::string load(const Brand& brand, void* runtime, GpuCalls& calls) {
  Loader loader(brand, runtime, brand.is_hip ? nullptr : open_below("libcuda.so.1"));
  NEED(GetDeviceCount);
  NEED(GetDevice);
  NEED(SetDevice);
  NEED(DeviceGetPCIBusId);
  NEED(DeviceCanAccessPeer);
  NEED(RuntimeGetVersion);
  NEED(GetErrorString);
  NEED(GetLastError);
  NEED(PointerGetAttributes);
  NEED(StreamCreateWithFlags);
  NEED(StreamDestroy);
  NEED(StreamSynchronize);
  NEED(StreamWaitEvent);
  NEED(EventCreateWithFlags);
  NEED(EventRecord);
  NEED(EventQuery);
  NEED(EventDestroy);
  NEED(MemcpyAsync);
  NEED(Memcpy2DAsync);
  NEED(HostRegister);
  NEED(HostUnregister);
  NEED(HostGetDevicePointer);
  NEED(IpcGetMemHandle);
  NEED(IpcOpenMemHandle);
  NEED(IpcCloseMemHandle);
  loader.driver(calls.MemGetAddressRange, "hipMemGetAddressRange", "cuMemGetAddressRange_v2");
  DRIVER(MemGetHandleForAddressRange);
  DRIVER(MemRetainAllocationHandle);
  DRIVER(MemExportToShareableHandle);
  DRIVER(MemImportFromShareableHandle);
  DRIVER(MemAddressReserve);
  DRIVER(MemAddressFree);
  DRIVER(MemMap);
  DRIVER(MemUnmap);
  DRIVER(MemSetAccess);
  DRIVER(MemRelease);
  if (!loader.missing().empty()) return "it has no " + loader.missing();
  if (calls.MemGetAddressRange == nullptr) return brand.is_hip ? "it has no hipMemGetAddressRange" : "no libcuda.so.1";
  if (brand.is_hip) {
    loader.driver(calls.StreamWaitValue, "hipStreamWaitValue32", "");
    if (void* const hsa = open_below("libhsa-runtime64.so.1")) {
      Loader::find(calls.hsa_init, hsa, "hsa_init");
      Loader::find(calls.hsa_export_dmabuf, hsa, "hsa_amd_portable_export_dmabuf");
      Loader::find(calls.hsa_export_dmabuf_v2, hsa, "hsa_amd_portable_export_dmabuf_v2");
    }
  } else {
    loader.driver(cuda_wait_value, "", "cuStreamWaitValue32_v2");
    if (cuda_wait_value != nullptr) calls.StreamWaitValue = wait_value_unmasked;
  }
  return "";
}

struct Candidate {
  const Brand* brand;
  std::string library;
  GpuCalls calls{};
  int devices = 0;
};

// A loaded or loadable library as a candidate; else why it is none.
std::string consider(const Brand& brand, const std::string& library, int flags, std::vector<Candidate>& out) {
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | flags);
  if (handle == nullptr) return library + " can't be opened";
  if (brand.is_hip && file_name(library).starts_with("libamdhip64.so.5"))
    return library + " is of ROCm 5; this library needs ROCm 6 or newer";
  Candidate made{&brand, library};
  if (const std::string missing = load(brand, handle, made.calls); !missing.empty())
    return library + " can't be used: " + missing;
  if (made.calls.GetDeviceCount(&made.devices) != 0) {
    (void)made.calls.GetLastError();
    made.devices = 0;
  }
  out.push_back(std::move(made));
  return "";
}

const Gpu* choose(std::vector<Candidate> found, std::string refused, std::string* why) {
  if (found.empty()) {
    *why = refused.empty() ? "no GPU runtime is loaded in this process (libamdhip64 or libcudart)" : refused;
    return nullptr;
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Candidate& a, const Candidate& b) { return (a.devices > 0) > (b.devices > 0); });
  const Candidate& best = found[0];
  std::string chosen;
  if (found.size() > 1) {
    const Candidate& other = found[1];
    chosen = std::string(best.brand->name) + " (" + best.library + ") and " + other.brand->name + " (" + other.library +
             ") are loaded; ";
    if (other.devices > 0) {
      *why = chosen + "both have devices, so it can't be told whose pointer an address is: load one of them only";
      return nullptr;
    }
    chosen += best.devices > 0 ? "only the first has devices" : "neither has devices";
  }
  return new Gpu(best.calls, best.brand->is_hip, best.library, chosen);  // as long as the process, like the library
}

const Gpu* search(std::string* why, bool may_load) {
  std::vector<Candidate> found;
  std::string refused;
  for (const Brand& brand : kBrands) {
    const auto paths = loaded(brand.file);
    if (paths.size() > 1) {
      *why = std::string("two ") + brand.name + " runtimes are loaded, " + paths[0] + " and " + paths[1] +
             ": memory of one is unknown to the other, so neither is used; keep only one, torch's own best";
      return nullptr;
    }
    if (paths.size() == 1) refused += consider(brand, paths[0], RTLD_NOLOAD, found);
  }
  if (found.empty() && refused.empty() && may_load) {
    for (const Brand& brand : kBrands) {
      for (const char* const* name = brand.names; *name != nullptr; ++name)
        if (consider(brand, *name, 0, found).empty()) break;
      if (!found.empty() && found.back().devices > 0) return choose({std::move(found.back())}, "", why);
    }
  }
  return choose(std::move(found), std::move(refused), why);
}

}  // namespace

const Gpu* Gpu::find(std::string* why, bool load) {
  static std::mutex lock;
  static const Gpu* found = nullptr;
  static int pid = this_pid();
  std::lock_guard guard(lock);
  if (found != nullptr && !is_this_process(pid)) {
    *why = "the GPU runtime was used before this process was forked, and can't be used after a fork: spawn instead";
    return nullptr;
  }
  pid = this_pid();
  if (found == nullptr) found = search(why, load);
  return found;
}

const Gpu& Gpu::need(const std::string& what) {
  std::string why;
  if (const Gpu* const gpu = find(&why)) return *gpu;
  throw Error(MR_CONFIG, what + ": " + why);
}

}  // namespace mr
