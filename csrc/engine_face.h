// What the files that implement engine.h share: how failures and bytes cross the C face, and what an engine is there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "transport/lanes.h"
#include "transport/node.h"

struct mr_engine {
  std::shared_ptr<mr::Node> node;
  std::shared_ptr<mr::MemoryKeeper> keeper;
  std::shared_ptr<mr::DeviceDomain> devices;
};

namespace mr {

inline void put_text(char* out, size_t capacity, const std::string& text) {
  const size_t length = std::min(text.size(), capacity - 1);
  std::memcpy(out, text.data(), length);
  out[length] = 0;
}

inline int tell(const Status& status, mr_error* error) {
  if (error != nullptr) {
    error->kind = status.kind;
    error->sys_errno = status.sys_errno;
    put_text(error->message, sizeof error->message, status.text);
  }
  return status.kind;
}

// No exception crosses the C face.
template <typename Body>
int guarded(mr_error* error, Body&& body) {
  try {
    body();
    return MR_OK;
  } catch (const Error& failure) {
    return tell(failure.status(), error);
  } catch (const std::bad_alloc&) {
    return tell(fail(MR_RESOURCE_EXHAUSTED, "out of memory"), error);
  } catch (const std::exception& failure) {
    return tell(fail(MR_CONFIG, failure.what()), error);
  }
}

inline uint64_t copy_out(ByteView bytes, uint8_t* out, uint64_t capacity) {
  if (out != nullptr) std::memcpy(out, bytes.data(), std::min<uint64_t>(bytes.size(), capacity));
  return bytes.size();
}

inline void demand_number(double timeout) {
  if (std::isnan(timeout)) throw Error(MR_CONFIG, "argument timeout is not a number");
}

inline Time deadline_of(Time now, double timeout) {
  if (timeout < 0 || timeout >= 1e9) return Time::max();
  return now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
}

// A region of ours, whose memory stays at least until it is dropped. `device`: see Region.
RegionRef make_region(mr_engine& engine, void* address, uint64_t size, uint32_t access, int device = -1);
// What others open.
RemoteRegion handle_of(Node& node, const Region& region);

}  // namespace mr
