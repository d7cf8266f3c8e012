// The place of an operation in a stream of a GPU: it begins after what was queued before it, and what is queued after
// it waits at a gate, a word of pinned memory that the stream waits for and a processor writes.
#pragma once

#include <memory>

#include "../memory/device.h"

namespace mr {

// An event on a stream: what was queued before it.
class StreamMark {
 public:
  StreamMark(const Gpu& gpu, int device, GpuStream stream);  // throws MR_CONFIG
  ~StreamMark();
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;
  bool is_reached(Status* status) const;  // *status: what was queued has failed

 private:
  const Gpu& gpu_;
  GpuEvent event_ = nullptr;
};

class StreamGate {
 public:
  // The stream waits from here on. Throws MR_CONFIG where the runtime has no waits for values.
  static std::shared_ptr<StreamGate> shut(const Gpu& gpu, int device, GpuStream stream);
  ~StreamGate() { open(); }
  void open();  // any thread

 private:
  explicit StreamGate(struct GateWord* word) : word_(word) {}
  struct GateWord* word_;
};

}  // namespace mr
