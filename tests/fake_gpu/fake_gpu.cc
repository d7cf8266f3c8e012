#include "fake_gpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

// Work in order, on a thread of its own. The first failure stays.
struct Stream {
  std::mutex lock;
  std::condition_variable wake, idle;
  std::deque<std::function<int()>> work;
  bool busy = false, ending = false;
  std::atomic<int> error{0};

  void run() {
    std::unique_lock guard(lock);
    while (true) {
      wake.wait(guard, [this] { return ending || !work.empty(); });
      if (work.empty()) break;
      auto task = std::move(work.front());
      work.pop_front();
      busy = true;
      guard.unlock();
      const int code = task();
      guard.lock();
      if (code != 0 && error == 0) error = code;
      busy = false;
      idle.notify_all();
    }
  }
  void add(std::function<int()> task) {
    std::lock_guard guard(lock);
    work.push_back(std::move(task));
    wake.notify_one();
  }
  void drain() {
    std::unique_lock guard(lock);
    idle.wait(guard, [this] { return work.empty() && !busy; });
  }
};

struct Event {
  struct State {
    std::mutex lock;
    std::condition_variable changed;
    bool pending = false;
    int code = 0;
  };
  std::shared_ptr<State> last = std::make_shared<State>();  // of the last time it was recorded
};

namespace {

enum Kind { kHost = 1, kDevice = 2, kManaged = 3 };

// A memfd, held as long as anybody can reach it.
struct Memory {
  int fd = -1;
  size_t size = 0;
  char* inside = nullptr;  // where the runtime itself reaches it
  ~Memory() {
    if (inside != nullptr) ::munmap(inside, size);
    if (fd >= 0) ::close(fd);
  }
};
using MemoryRef = std::shared_ptr<Memory>;

struct Allocation {
  size_t size = 0;
  int device = 0, kind = kDevice;
  bool expandable = false, opened = false, accessible = true;
  MemoryRef memory;
};

constexpr size_t kPage = 4096, kGranule = 2u << 20, kArena = 64ull << 30;

// Whether processors may touch device memory: then emulated kernels can run on it.
bool is_touchable() {
  static const bool touchable = std::getenv("FAKE_GPU_TOUCHABLE") != nullptr;
  return touchable;
}

void show(uintptr_t at, const Memory& memory) {
  void* const place = reinterpret_cast<void*>(at);
  if (::mmap(place, memory.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.fd, 0) != place) std::abort();
}
void hide(uintptr_t at, size_t size) {
  void* const place = reinterpret_cast<void*>(at);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (::mmap(place, size, PROT_NONE, flags, -1, 0) != place) std::abort();
}

struct World {
  std::mutex lock;
  std::map<uintptr_t, Allocation> allocations;  // device memory, by address
  std::map<uintptr_t, size_t> reserved;
  std::map<uintptr_t, size_t> registered;               // host memory
  std::map<std::string, std::pair<int, int>> failures;  // call -> code, times (negative: for ever)
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::set<void*> handles;
  uintptr_t arena = 0, next = 0;
  std::vector<int> visible;
  int delay_us = 0;
};

std::vector<int> numbers(const char* text) {
  std::vector<int> out;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, ',');)
    if (!part.empty()) out.push_back(std::atoi(part.c_str()));
  return out;
}

int setting(const char* name, int otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? std::atoi(value) : otherwise;
}

// Lives as long as the process: streams use it until the very end.
World& world() {
  static World* const made = [] {
    auto* out = new World;
    out->arena = out->next = reinterpret_cast<uintptr_t>(
        ::mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (int i = 0; i < setting("FAKE_GPU_COUNT", 2); ++i) out->visible.push_back(i);
    for (const char* name : {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"})
      if (const char* value = std::getenv(name)) out->visible = numbers(value);
    out->delay_us = setting("FAKE_GPU_COPY_DELAY_US", 0);
    if (const char* value = std::getenv("FAKE_GPU_FAIL")) {
      std::stringstream in(value);
      for (std::string part; std::getline(in, part, ',');)
        if (const auto equals = part.find('='); equals != std::string::npos)
          out->failures[part.substr(0, equals)] = {std::atoi(part.c_str() + equals + 1), -1};
    }
    return out;
  }();
  return *made;
}

thread_local int t_device = 0;
std::atomic<int> g_last_error{0};

int failed(int code) {
  if (code != 0) g_last_error = code;
  return code;
}

size_t up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

uintptr_t take_range(World& w, size_t size) {
  const uintptr_t at = w.next;
  if (at + size + kPage > w.arena + kArena) std::abort();
  w.next += up(size, kPage) + kPage;  // a page between two
  return at;
}

MemoryRef memory_of(int fd, size_t size) {
  auto out = std::make_shared<Memory>();
  out->fd = fd;
  out->size = size;
  void* const at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return nullptr;
  out->inside = static_cast<char*>(at);
  return out;
}

MemoryRef fresh_memory(size_t size) {
  const int fd = ::memfd_create("fake gpu", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size)) != 0) return nullptr;
  return memory_of(fd, size);
}

std::map<uintptr_t, Allocation>::iterator find(World& w, const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto found = w.allocations.upper_bound(at);
  if (found == w.allocations.begin()) return w.allocations.end();
  --found;
  return at < found->first + found->second.size ? found : w.allocations.end();
}

bool in_arena(const World& w, const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at >= w.arena && at < w.arena + kArena;
}

struct Span {
  char* at;
  size_t size;
  MemoryRef held;
};

// Where the runtime reaches these bytes; false: they are no memory that it may touch.
bool resolve(const void* address, size_t size, std::vector<Span>& out) {
  World& w = world();
  std::lock_guard guard(w.lock);
  auto* at = const_cast<char*>(static_cast<const char*>(address));
  while (size > 0) {
    const auto found = find(w, at);
    if (found == w.allocations.end()) {
      if (in_arena(w, at)) return false;
      out.push_back({at, size, nullptr});  // of the host
      return true;
    }
    const auto& [base, allocation] = *found;
    if (!allocation.accessible) return false;
    const size_t offset = reinterpret_cast<uintptr_t>(at) - base, part = std::min(size, allocation.size - offset);
    out.push_back({allocation.memory->inside + offset, part, allocation.memory});
    at += part;
    size -= part;
  }
  return true;
}

int copy_now(char* to, const char* from, size_t size) {
  std::vector<Span> there, here;
  if (!resolve(to, size, there) || !resolve(from, size, here)) return kIllegalAddress;
  for (size_t i = 0, j = 0; i < there.size() && j < here.size();) {
    const size_t part = std::min(there[i].size, here[j].size);
    std::memmove(there[i].at, here[j].at, part);
    there[i].at += part, here[j].at += part;
    if ((there[i].size -= part) == 0) ++i;
    if ((here[j].size -= part) == 0) ++j;
  }
  return kOk;
}

void slow_down() {
  if (const int delay = world().delay_us; delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
}

Stream* real(Stream* stream) {
  static Stream* const default_stream = [] {
    auto* out = new Stream;
    std::thread([out] { out->run(); }).detach();
    return out;
  }();
  return stream != nullptr ? stream : default_stream;
}

void drain_all() {
  std::vector<Stream*> all{real(nullptr)};
  {
    std::lock_guard guard(world().lock);
    all.insert(all.end(), world().streams.begin(), world().streams.end());
  }
  for (Stream* stream : all) stream->drain();
}

struct IpcContent {  // without gaps: the same memory has the same bytes
  uint64_t size;
  int pid, fd;
};

struct Handle {
  MemoryRef memory;
};

}  // namespace

int injected(const char* call) {
  World& w = world();
  std::lock_guard guard(w.lock);
  const auto found = w.failures.find(call);
  if (found == w.failures.end() || found->second.second == 0) return kOk;
  if (found->second.second > 0) --found->second.second;
  g_last_error = found->second.first;
  return found->second.first;
}

// ---- Devices ----

int device_count(int* count) {
  *count = static_cast<int>(world().visible.size());
  return *count > 0 ? kOk : failed(kNoDevice);
}
int get_device(int* device) { return *device = t_device, kOk; }
int set_device(int device) {
  if (device < 0 || device >= static_cast<int>(world().visible.size())) return failed(kInvalidDevice);
  t_device = device;
  return kOk;
}
int pci_bus_id(char* out, int capacity, int device) {
  if (device < 0 || device >= static_cast<int>(world().visible.size())) return failed(kInvalidDevice);
  std::snprintf(out, static_cast<size_t>(capacity), "0000:C%d:00.0", world().visible[static_cast<size_t>(device)]);
  return kOk;
}
int can_access_peer(int* can, int, int) { return *can = setting("FAKE_GPU_NO_PEERS", 0) == 0, kOk; }
const char* error_string(int code) {
  return code == kInvalidValue     ? "invalid argument"
         : code == kIllegalAddress ? "an illegal memory access was encountered"
         : code == kNotSupported   ? "operation not supported"
         : code == kInvalidDevice  ? "invalid device ordinal"
                                   : "unknown error";
}
int last_error() { return g_last_error.exchange(0); }

// ---- Memory ----

namespace {

int allocate(void** out, size_t size, size_t piece, bool expandable, int kind) {
  if (const int code = injected("Malloc")) return code;
  if (world().visible.empty()) return failed(kNoDevice);
  size = up(std::max<size_t>(size, 1), expandable ? kGranule : kPage);
  World& w = world();
  std::lock_guard guard(w.lock);
  const uintptr_t at = take_range(w, size);
  for (size_t done = 0; done < size; done += piece == 0 ? size : piece) {
    const size_t part = piece == 0 ? size : std::min(piece, size - done);
    auto memory = fresh_memory(part);
    if (!memory) return failed(kOutOfMemory);
    if (kind == kManaged || is_touchable()) show(at + done, *memory);
    w.allocations[at + done] = {part, t_device, kind, expandable, false, true, std::move(memory)};
  }
  *out = reinterpret_cast<void*>(at);
  return kOk;
}

}  // namespace

int malloc_device(void** out, size_t size) { return allocate(out, size, 0, false, kDevice); }
int malloc_expandable(void** out, size_t size) { return allocate(out, size, kGranule, true, kDevice); }
int malloc_managed(void** out, size_t size) { return allocate(out, size, 0, false, kManaged); }

int free_device(void* address) {
  drain_all();  // as the real ones do
  World& w = world();
  std::lock_guard guard(w.lock);
  auto found = w.allocations.find(reinterpret_cast<uintptr_t>(address));
  if (found == w.allocations.end() || found->second.opened) return failed(kInvalidValue);
  const bool expandable = found->second.expandable;
  uintptr_t next = found->first;
  while (found != w.allocations.end() && found->first == next && found->second.expandable == expandable) {
    next += found->second.size;
    if (found->second.kind == kManaged || is_touchable()) hide(found->first, found->second.size);
    found = w.allocations.erase(found);
    if (!expandable) break;
  }
  return kOk;
}

int host_register(void* address, size_t size) {
  if (const int code = injected("HostRegister")) return code;
  std::lock_guard guard(world().lock);
  return world().registered.emplace(reinterpret_cast<uintptr_t>(address), size).second ? kOk : failed(kInvalidValue);
}
int host_unregister(void* address) {
  std::lock_guard guard(world().lock);
  return world().registered.erase(reinterpret_cast<uintptr_t>(address)) != 0 ? kOk : failed(kInvalidValue);
}

int pointer_attributes(Attributes* out, const void* address) {
  if (const int code = injected("PointerGetAttributes")) return code;
  World& w = world();
  std::lock_guard guard(w.lock);
  std::memset(out, 0, sizeof *out);
  if (const auto found = find(w, address); found != w.allocations.end()) {
    out->type = found->second.kind;
    out->device = found->second.device;
    out->device_pointer = const_cast<void*>(address);
    return kOk;
  }
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto found = w.registered.upper_bound(at);
  if (found != w.registered.begin() && at < std::prev(found)->first + std::prev(found)->second) out->type = kHost;
  return kOk;
}

int address_range(void** base, size_t* size, void* address) {
  World& w = world();
  std::lock_guard guard(w.lock);
  const auto found = find(w, address);
  if (found == w.allocations.end()) return failed(kInvalidValue);
  *base = reinterpret_cast<void*>(found->first);
  *size = found->second.size;
  return kOk;
}

// ---- Streams ----

int stream_create(Stream** out) {
  if (const int code = injected("StreamCreateWithFlags")) return code;
  *out = new Stream;
  std::thread([stream = *out] { stream->run(); }).detach();
  std::lock_guard guard(world().lock);
  world().streams.insert(*out);
  return kOk;
}
int stream_destroy(Stream* stream) {
  stream->drain();
  {
    std::lock_guard guard(world().lock);
    world().streams.erase(stream);
  }
  std::lock_guard guard(stream->lock);  // its thread ends; the few bytes stay
  stream->ending = true;
  stream->wake.notify_one();
  return kOk;
}
int stream_synchronize(Stream* stream) {
  real(stream)->drain();
  return failed(real(stream)->error);
}
int stream_wait_event(Stream* stream, Event* event) {
  real(stream)->add([state = event->last] {
    std::unique_lock guard(state->lock);
    state->changed.wait(guard, [&] { return !state->pending; });
    return state->code;
  });
  return kOk;
}
int stream_wait_value(Stream* stream, void* address, uint32_t value, unsigned flags) {
  if (const int code = injected("StreamWaitValue32")) return code;
  if (flags > 1) return failed(kInvalidValue);
  auto* const word = static_cast<uint32_t*>(address);
  real(stream)->add([word, value, flags] {
    const auto reached = [&] {
      const uint32_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
      return flags == 0 ? static_cast<int32_t>(now - value) >= 0 : now == value;
    };
    while (!reached()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    return kOk;
  });
  return kOk;
}
int event_create(Event** out) {
  if (const int code = injected("EventCreateWithFlags")) return code;
  *out = new Event;
  std::lock_guard guard(world().lock);
  world().events.insert(*out);
  return kOk;
}
int event_record(Event* event, Stream* stream) {
  if (const int code = injected("EventRecord")) return code;
  auto state = std::make_shared<Event::State>();
  state->pending = true;
  event->last = state;
  Stream* const on = real(stream);
  on->add([state, on] {
    std::lock_guard guard(state->lock);
    state->pending = false;
    state->code = on->error;
    state->changed.notify_all();
    return kOk;
  });
  return kOk;
}
int event_query(Event* event) {
  std::lock_guard guard(event->last->lock);
  return event->last->pending ? int{kNotReady} : failed(event->last->code);
}
int event_destroy(Event* event) {
  {
    std::lock_guard guard(world().lock);
    if (world().events.erase(event) == 0) return failed(kInvalidValue);
  }
  delete event;
  return kOk;
}
int copy_async(void* to, const void* from, size_t size, Stream* stream) {
  if (const int code = injected("MemcpyAsync")) return code;
  real(stream)->add([=] {
    slow_down();
    return copy_now(static_cast<char*>(to), static_cast<const char*>(from), size);
  });
  return kOk;
}
int copy_2d_async(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                  Stream* stream) {
  if (const int code = injected("Memcpy2DAsync")) return code;
  if (width > to_pitch || width > from_pitch) return failed(kInvalidValue);
  real(stream)->add([=] {
    slow_down();
    for (size_t row = 0; row < height; ++row)
      if (const int code = copy_now(static_cast<char*>(to) + row * to_pitch,
                                    static_cast<const char*>(from) + row * from_pitch, width))
        return code;
    return int{kOk};
  });
  return kOk;
}

// ---- Between processes ----

int ipc_get(IpcHandle* out, void* address) {
  if (const int code = injected("IpcGetMemHandle")) return code;
  World& w = world();
  std::lock_guard guard(w.lock);
  const auto found = find(w, address);
  if (found == w.allocations.end() || found->second.expandable || found->second.opened) return failed(kInvalidValue);
  std::memset(out, 0, sizeof *out);
  const IpcContent content{found->second.size, ::getpid(), found->second.memory->fd};
  std::memcpy(out->bytes, &content, sizeof content);
  return kOk;
}

int ipc_open(void** out, const IpcHandle& handle) {
  if (const int code = injected("IpcOpenMemHandle")) return code;
  IpcContent content;
  std::memcpy(&content, handle.bytes, sizeof content);
  if (content.pid == ::getpid()) return failed(kInvalidValue);  // as the real ones: not within one process
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", content.pid, content.fd);
  const int fd = ::open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return failed(kInvalidValue);
  auto memory = memory_of(fd, content.size);
  World& w = world();
  std::lock_guard guard(w.lock);
  const uintptr_t at = take_range(w, content.size);
  if (is_touchable()) show(at, *memory);
  w.allocations[at] = {content.size, t_device, kDevice, false, true, true, std::move(memory)};
  *out = reinterpret_cast<void*>(at);
  return kOk;
}

int ipc_close(void* address) {
  World& w = world();
  std::lock_guard guard(w.lock);
  const auto found = w.allocations.find(reinterpret_cast<uintptr_t>(address));
  if (found == w.allocations.end() || !found->second.opened) return failed(kInvalidValue);
  if (is_touchable()) hide(found->first, found->second.size);
  w.allocations.erase(found);
  return kOk;
}

int export_dmabuf(const void* address, size_t size, int* fd, uint64_t* offset) {
  World& w = world();
  std::lock_guard guard(w.lock);
  const auto found = find(w, address);
  if (found == w.allocations.end()) return failed(kInvalidValue);
  const uint64_t begin = reinterpret_cast<uintptr_t>(address) - found->first;
  if (begin + size > found->second.size) return failed(kInvalidValue);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", found->second.memory->fd);
  *fd = ::open(path, O_RDWR | O_CLOEXEC);  // with a position of its own
  if (*fd < 0) return failed(kOutOfMemory);
  if (offset != nullptr)
    *offset = begin;
  else
    ::lseek(*fd, static_cast<off_t>(begin), SEEK_SET);
  return kOk;
}

int retain_allocation(void** handle, void* address) {
  World& w = world();
  std::lock_guard guard(w.lock);
  const auto found = find(w, address);
  if (found == w.allocations.end() || !found->second.expandable) return failed(kInvalidValue);
  w.handles.insert(*handle = new Handle{found->second.memory});
  return kOk;
}
int release_allocation(void* handle) {
  std::lock_guard guard(world().lock);
  if (world().handles.erase(handle) == 0) return failed(kInvalidValue);
  delete static_cast<Handle*>(handle);
  return kOk;
}
int export_shareable(int* fd, void* handle) {
  if (const int code = injected("MemExportToShareableHandle")) return code;
  *fd = ::fcntl(static_cast<Handle*>(handle)->memory->fd, F_DUPFD_CLOEXEC, 0);
  return kOk;
}
int import_shareable(void** handle, int fd) {
  const off_t size = ::lseek(fd, 0, SEEK_END);
  if (size <= 0) return failed(kInvalidValue);
  std::lock_guard guard(world().lock);
  world().handles.insert(*handle = new Handle{memory_of(::fcntl(fd, F_DUPFD_CLOEXEC, 0), static_cast<size_t>(size))});
  return kOk;
}
int reserve(void** out, size_t size) {
  World& w = world();
  std::lock_guard guard(w.lock);
  const uintptr_t at = take_range(w, size);
  w.reserved[at] = size;
  *out = reinterpret_cast<void*>(at);
  return kOk;
}
int unreserve(void* address, size_t size) {
  std::lock_guard guard(world().lock);
  const auto found = world().reserved.find(reinterpret_cast<uintptr_t>(address));
  if (found == world().reserved.end() || found->second != size) return failed(kInvalidValue);
  world().reserved.erase(found);
  return kOk;
}
int map(void* address, size_t size, void* handle) {
  if (const int code = injected("MemMap")) return code;
  World& w = world();
  std::lock_guard guard(w.lock);
  const MemoryRef& memory = static_cast<Handle*>(handle)->memory;
  if (size != memory->size) return failed(kInvalidValue);
  if (is_touchable()) show(reinterpret_cast<uintptr_t>(address), *memory);
  w.allocations[reinterpret_cast<uintptr_t>(address)] = {size, t_device, kDevice, true, true, false, memory};
  return kOk;
}
int unmap(void* address, size_t size) {
  World& w = world();
  std::lock_guard guard(w.lock);
  const auto found = w.allocations.find(reinterpret_cast<uintptr_t>(address));
  if (found == w.allocations.end() || found->second.size != size) return failed(kInvalidValue);
  if (is_touchable()) hide(found->first, size);
  w.allocations.erase(found);
  return kOk;
}
int set_access(void* address, size_t size) {
  World& w = world();
  std::lock_guard guard(w.lock);
  for (auto at = reinterpret_cast<uintptr_t>(address), end = at + size; at < end;) {
    const auto found = w.allocations.find(at);
    if (found == w.allocations.end()) return failed(kInvalidValue);
    found->second.accessible = true;
    at += found->second.size;
  }
  return kOk;
}

}  // namespace fake

// ---- For tests, by name, in every spelling ----

using namespace fake;

// The next `times` calls (negative: all) of this name end with the code.
EXPORT void fake_gpu_fail(const char* call, int code, int times) {
  std::lock_guard guard(world().lock);
  world().failures[call] = {code, times};
}
EXPORT void fake_gpu_delay(int microseconds) { world().delay_us = microseconds; }
// What a kernel would do: fills memory, some time after it was launched.
EXPORT int fake_gpu_fill_later(void* stream, void* address, int value, size_t size, int microseconds) {
  real(static_cast<Stream*>(stream))->add([=] {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    std::vector<Span> spans;
    if (!resolve(address, size, spans)) return int{kIllegalAddress};
    for (const auto& span : spans) std::memset(span.at, value, span.size);
    return int{kOk};
  });
  return kOk;
}
EXPORT int fake_gpu_malloc(void** out, size_t size) { return malloc_device(out, size); }
EXPORT int fake_gpu_malloc_expandable(void** out, size_t size) { return malloc_expandable(out, size); }
EXPORT int fake_gpu_malloc_managed(void** out, size_t size) { return malloc_managed(out, size); }
EXPORT int fake_gpu_free(void* address) { return free_device(address); }
EXPORT int fake_gpu_set_device(int device) { return set_device(device); }
// At once, past all streams: how a test looks at device memory.
EXPORT int fake_gpu_copy(void* to, const void* from, size_t size) {
  return copy_now(static_cast<char*>(to), static_cast<const char*>(from), size);
}
EXPORT int fake_gpu_stream_create(void** out) { return stream_create(reinterpret_cast<Stream**>(out)); }
EXPORT int fake_gpu_stream_destroy(void* stream) { return stream_destroy(static_cast<Stream*>(stream)); }
EXPORT int fake_gpu_stream_synchronize(void* stream) { return stream_synchronize(static_cast<Stream*>(stream)); }
// What the driver tells the kernel of a range, as a peer memory module asks it.
EXPORT int fake_gpu_pages(const void* address, size_t size, int* fd, uint64_t* offset) {
  return export_dmabuf(address, size, fd, offset);
}
// What is held: "opened" memory of other processes, "events", "handles", "registered" host memory, "streams".
EXPORT int fake_gpu_held(const char* what) {
  World& w = world();
  std::lock_guard guard(w.lock);
  const std::string name = what;
  if (name == "events") return static_cast<int>(w.events.size());
  if (name == "handles") return static_cast<int>(w.handles.size() + w.reserved.size());
  if (name == "registered") return static_cast<int>(w.registered.size());
  if (name == "streams") return static_cast<int>(w.streams.size());
  return static_cast<int>(
      std::count_if(w.allocations.begin(), w.allocations.end(), [](const auto& entry) { return entry.second.opened; }));
}
