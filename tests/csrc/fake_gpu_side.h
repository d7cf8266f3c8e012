// The fake GPU runtime (tests/fake_gpu) in this process.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace mr::test {

inline std::string fake_gpu_folder() {
  char path[4096];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path);
  const std::string program(path, static_cast<size_t>(length));
  return program.substr(0, program.rfind("/tests/")) + "/fake_gpu/";
}

inline void* load_fake_gpu(const std::string& library) {
  void* const handle = ::dlopen((fake_gpu_folder() + library).c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) throw std::logic_error(::dlerror());
  return handle;
}

// What tests ask of it.
struct FakeGpu {
  explicit FakeGpu(const std::string& library = "libamdhip64.so.7") {
    if (library == "libamdhip64.so.7") load_fake_gpu("libhsa-runtime64.so.1");
    if (library == "libcudart.so.13") load_fake_gpu("libcuda.so.1");
    handle_ = load_fake_gpu(library);
  }
  void* allocate(size_t size, const char* how = "fake_gpu_malloc") const {
    void* out = nullptr;
    if (call<int(void**, size_t)>(how)(&out, size) != 0) throw std::logic_error("no fake device memory");
    return out;
  }
  void free(void* address) const { call<int(void*)>("fake_gpu_free")(address); }
  void copy(void* to, const void* from, size_t size) const {
    if (call<int(void*, const void*, size_t)>("fake_gpu_copy")(to, from, size) != 0)
      throw std::logic_error("not memory");
  }
  void fail(const char* name, int code, int times = 1) const {
    call<void(const char*, int, int)>("fake_gpu_fail")(name, code, times);
  }
  void set_device(int device) const { call<int(int)>("fake_gpu_set_device")(device); }
  int held(const char* what) const { return call<int(const char*)>("fake_gpu_held")(what); }

 private:
  template <typename Signature>
  Signature* call(const char* name) const {
    auto* const found = reinterpret_cast<Signature*>(::dlsym(handle_, name));
    if (found == nullptr) throw std::logic_error(name);
    return found;
  }
  void* handle_;
};

}  // namespace mr::test
