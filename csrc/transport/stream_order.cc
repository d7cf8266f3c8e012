#include "stream_order.h"

#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace mr {

// The gate that has number n is open once the word has reached n. Words are used again at once: who still waits for an
// older number passes at newer ones as well.
struct GateWord {
  std::atomic<uint32_t>* value;
  void* on_device;
  uint32_t number = 0;
};

namespace {

constexpr unsigned kNoTiming = 2, kPortableMapped = 3, kAtLeast = 0;
constexpr int kNotReady = 600;
constexpr uint64_t kPage = 4096, kStep = 64;

// Streams may wait for a word after its engine is gone, so the pages stay as long as the process.
class GateWords {
 public:
  GateWord* take(const Gpu& gpu) {
    std::lock_guard guard(lock_);
    if (free_.empty()) add_page(gpu);
    GateWord* const word = free_.back();
    free_.pop_back();
    return word;
  }
  void give_back(GateWord* word) {
    std::lock_guard guard(lock_);
    free_.push_back(word);
  }

 private:
  void add_page(const Gpu& gpu) {
    void* const page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw Error(MR_RESOURCE_EXHAUSTED, "no memory for gates of streams", errno);
    void* on_device = nullptr;
    int code = gpu.calls.HostRegister(page, kPage, kPortableMapped);
    if (code == 0) code = gpu.calls.HostGetDevicePointer(&on_device, page, 0);
    gpu.check(code, MR_RESOURCE_EXHAUSTED, "HostRegister", "a page for gates of streams");
    for (uint64_t at = 0; at < kPage; at += kStep)
      free_.push_back(new GateWord{reinterpret_cast<std::atomic<uint32_t>*>(static_cast<char*>(page) + at),
                                   static_cast<char*>(on_device) + at});
  }

  std::mutex lock_;
  std::vector<GateWord*> free_;
};

GateWords& words() {
  static auto& all = *new GateWords;
  return all;
}

}  // namespace

StreamMark::StreamMark(const Gpu& gpu, int device, GpuStream stream) : gpu_(gpu) {
  const OnDevice scope(gpu, device);
  const std::string of = "a stream of device " + std::to_string(device);
  gpu.check(gpu.calls.EventCreateWithFlags(&event_, kNoTiming), MR_CONFIG, "EventCreateWithFlags", of);
  if (const int code = gpu.calls.EventRecord(event_, stream); code != 0) {
    (void)gpu.calls.EventDestroy(event_);
    throw Error(gpu.failure(MR_CONFIG, "EventRecord", of, code));
  }
}

StreamMark::~StreamMark() { (void)gpu_.calls.EventDestroy(event_); }

bool StreamMark::is_reached(Status* status) const {
  const int code = gpu_.calls.EventQuery(event_);
  if (code == kNotReady) return false;
  if (code != 0) *status = gpu_.failure(MR_CONFIG, "EventQuery", "the work that the stream has before it", code);
  return true;
}

std::shared_ptr<StreamGate> StreamGate::shut(const Gpu& gpu, int device, GpuStream stream) {
  if (gpu.calls.StreamWaitValue == nullptr)
    throw Error(MR_CONFIG, "argument stream: this runtime (" + gpu.library +
                               ") has no waits for values, so no stream can wait for a transfer; wait for its future");
  GateWord* const word = words().take(gpu);
  std::shared_ptr<StreamGate> gate(new StreamGate(word));
  const OnDevice scope(gpu, device);
  gpu.check(gpu.calls.StreamWaitValue(stream, word->on_device, ++word->number, kAtLeast, ~0u), MR_CONFIG,
            gpu.is_hip ? "hipStreamWaitValue32" : "cuStreamWaitValue32",
            "a stream of device " + std::to_string(device));
  return gate;
}

void StreamGate::open() {
  GateWord* const word = std::exchange(word_, nullptr);
  if (word == nullptr) return;
  word->value->store(word->number, std::memory_order_release);
  words().give_back(word);
}

}  // namespace mr
