// What the lanes of device memory share in an engine: its thread, a stream on each device, and host memory that devices
// reach (pinned) for bytes on their way. But for what says otherwise: on the domain's thread.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "../memory/device.h"
#include "../memory/region.h"
#include "device_thread.h"

namespace mr {

class MemoryKeeper;

// Host memory that is pinned for all devices as long as this lives, where there is a runtime.
class Pinned {
 public:
  Pinned(void* address, uint64_t size);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  void* const address_;
  const Gpu* by_ = nullptr;
};

// Pieces of one size of a block. Whoever finds none waits to be called when one is given back.
class Slots {
 public:
  static constexpr uint64_t kBytes = 2u << 20;

  explicit Slots(uint32_t count) : count_(count) {}
  // -1: none is free.
  int take();
  void give_back(int slot);
  void wait(std::function<void()> then) { waiting_.push_back(std::move(then)); }
  uint32_t count() const { return count_; }

 private:
  const uint32_t count_;
  uint32_t given_ = 0;
  std::vector<int> free_;
  std::deque<std::function<void()>> waiting_;
};

class DeviceDomain : public std::enable_shared_from_this<DeviceDomain> {
 public:
  using Done = std::function<void(Status)>;
  struct Side {
    uint8_t* base;
    Cursor at;  // the first byte to copy
  };

  explicit DeviceDomain(std::shared_ptr<MemoryKeeper> keeper) : keeper_(std::move(keeper)) {}
  ~DeviceDomain();

  DeviceThread& thread() { return thread_; }
  void close();  // any thread

  // Copies between memory of the device, of devices that it reaches, and of the host, in the order of the two views.
  // `done` is called when all of it has ended, or been given up.
  void copy(int device, Side to, Side from, uint64_t length, Done done);

  // For bytes of ours on their way.
  Slots& slots() { return slots_; }
  uint8_t* slot_address(int slot);  // throws MR_RESOURCE_EXHAUSTED

 private:
  GpuStream stream(const Gpu& gpu, int device);

  const std::shared_ptr<MemoryKeeper> keeper_;
  DeviceThread thread_;
  std::map<int, GpuStream> streams_;  // by device
  Slots slots_{8};
  std::unique_ptr<Mapping> block_;  // of the slots
  std::unique_ptr<Pinned> pinned_;
};

}  // namespace mr
