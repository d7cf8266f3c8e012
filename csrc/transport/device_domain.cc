#include "device_domain.h"

#include "lanes.h"

namespace mr {
namespace {

constexpr unsigned kPortableMapped = 3, kNonBlocking = 1, kNoTiming = 2;
constexpr int kAnyKind = 4, kNotReady = 600;
constexpr uint64_t kMaxPitch = 0x7fffffff;

// Collects runs that have one length and equal distances: one copy of rows.
class Rows {
 public:
  Rows(const Gpu& gpu, GpuStream stream) : gpu_(gpu), stream_(stream) {}

  int add(uint8_t* to, const uint8_t* from, uint64_t length) {
    if (height_ > 0 && length == width_ && continues(to, from)) {
      if (height_ == 1) to_pitch_ = to - to_, from_pitch_ = from - from_;
      ++height_;
      return 0;
    }
    const int code = flush();
    to_ = to, from_ = from, width_ = length, height_ = 1;
    return code;
  }

  int flush() {
    const uint64_t height = std::exchange(height_, 0);
    if (height == 0) return 0;
    if (height == 1) return gpu_.calls.MemcpyAsync(to_, from_, width_, kAnyKind, stream_);
    return gpu_.calls.Memcpy2DAsync(to_, to_pitch_, from_, from_pitch_, width_, height, kAnyKind, stream_);
  }

 private:
  bool continues(const uint8_t* to, const uint8_t* from) const {
    const auto next = [](const uint8_t* at, const uint8_t* first, uint64_t pitch, uint64_t rows, uint64_t width) {
      if (at <= first) return false;
      const auto gap = static_cast<uint64_t>(at - first);
      return rows == 1 ? gap >= width && gap <= kMaxPitch : gap == pitch * rows;
    };
    return next(to, to_, to_pitch_, height_, width_) && next(from, from_, from_pitch_, height_, width_);
  }

  const Gpu& gpu_;
  const GpuStream stream_;
  uint8_t* to_ = nullptr;
  const uint8_t* from_ = nullptr;
  uint64_t width_ = 0, height_ = 0, to_pitch_ = 0, from_pitch_ = 0;
};

Status enqueue(const Gpu& gpu, GpuStream stream, DeviceDomain::Side& to, DeviceDomain::Side& from, uint64_t length) {
  Rows rows(gpu, stream);
  int code = 0;
  for (uint64_t left = length; left > 0 && code == 0;) {
    const auto there = to.at.peek(left);
    const auto here = from.at.next(there.length);
    to.at.advance(here.length);
    code = rows.add(to.base + there.offset, from.base + here.offset, here.length);
    left -= here.length;
  }
  if (code == 0) code = rows.flush();
  return code == 0 ? Status{} : gpu.failure(MR_REGISTRATION, "MemcpyAsync", std::to_string(length) + " bytes", code);
}

}  // namespace

Pinned::Pinned(void* address, uint64_t size) : address_(address) {
  std::string why;
  const Gpu* const gpu = Gpu::find(&why);
  if (gpu == nullptr) return;
  if (gpu->calls.HostRegister(address, size, kPortableMapped) == 0)
    by_ = gpu;
  else
    (void)gpu->calls.GetLastError();  // then the runtime copies through pinned memory of its own
}

Pinned::~Pinned() {
  if (by_ != nullptr && by_->calls.HostUnregister(address_) != 0)
    (void)by_->calls.GetLastError();  // its devices have failed
}

int Slots::take() {
  if (free_.empty()) return given_ < count_ ? static_cast<int>(given_++) : -1;
  const int slot = free_.back();
  free_.pop_back();
  return slot;
}

void Slots::give_back(int slot) {
  free_.push_back(slot);
  for (const auto& then : std::exchange(waiting_, {})) then();
}

DeviceDomain::~DeviceDomain() { close(); }

void DeviceDomain::close() {
  thread_.close();
  if (!thread_.is_ours()) return;
  for (const auto& [device, stream] : std::exchange(streams_, {}))
    if (const Gpu& gpu = Gpu::need("a stream"); gpu.calls.StreamDestroy(stream) != 0) (void)gpu.calls.GetLastError();
  if (block_ && keeper_) keeper_->forget(block_->address(), block_->size());
  pinned_.reset();
  block_.reset();
}

GpuStream DeviceDomain::stream(const Gpu& gpu, int device) {
  GpuStream& out = streams_[device];
  if (out == nullptr)
    gpu.check(gpu.calls.StreamCreateWithFlags(&out, kNonBlocking), MR_RESOURCE_EXHAUSTED, "StreamCreateWithFlags",
              "device " + std::to_string(device));
  return out;
}

void DeviceDomain::copy(int device, Side to, Side from, uint64_t length, Done done) {
  if (length == 0) return done({});
  GpuEvent event = nullptr;
  Status status;
  const Gpu* gpu = nullptr;
  try {
    gpu = &Gpu::need("a copy of device memory");
    const OnDevice scope(*gpu, device);
    const GpuStream on = stream(*gpu, device);
    gpu->check(gpu->calls.EventCreateWithFlags(&event, kNoTiming), MR_RESOURCE_EXHAUSTED, "EventCreateWithFlags",
               "device " + std::to_string(device));
    status = enqueue(*gpu, on, to, from, length);  // what was queued before a failure has to end, too
    if (const int code = gpu->calls.EventRecord(event, on); code != 0 && status.ok())
      status = gpu->failure(MR_REGISTRATION, "EventRecord", "device " + std::to_string(device), code);
  } catch (const Error& error) {
    if (event != nullptr) (void)gpu->calls.EventDestroy(event);
    return done(error.status());
  }
  thread_.poll([gpu, event, status, length, done = std::move(done)](bool ending) mutable {
    const int code = gpu->calls.EventQuery(event);
    if (code == kNotReady && !ending) return false;
    if (code != 0 && status.ok())
      status = gpu->failure(MR_REGISTRATION, "MemcpyAsync", std::to_string(length) + " bytes", code);
    (void)gpu->calls.EventDestroy(event);
    done(std::move(status));
    return true;
  });
}

uint8_t* DeviceDomain::slot_address(int slot) {
  if (!block_) {
    const uint64_t size = slots_.count() * Slots::kBytes;
    block_ = std::make_unique<Mapping>(make_memfd("monarch_rdma staging", size).get(), size, true);
    pinned_ = std::make_unique<Pinned>(block_->address(), size);
    if (keeper_) keeper_->keep(block_->address(), size);
  }
  return block_->address() + static_cast<uint64_t>(slot) * Slots::kBytes;
}

}  // namespace mr
