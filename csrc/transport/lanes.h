// The lanes of this build, and what an engine has for them.
#pragma once

#include <memory>
#include <vector>

#include "options.h"
#include "peer.h"

namespace mr {

// Hears which memory stays where it is, so that what is known about it may be kept. See mr_memory_keep. Any thread.
class MemoryKeeper {
 public:
  virtual void keep(const void* address, uint64_t size) = 0;
  virtual void forget(const void* address, uint64_t size) = 0;

 protected:
  ~MemoryKeeper() = default;
};

class DeviceDomain;

struct Lanes {
  std::vector<Home::LaneType> types;
  std::shared_ptr<DeviceDomain> devices;
  std::shared_ptr<MemoryKeeper> keeper;  // null where no lane cares
};

// For one engine. Takes those out of options.lanes that this host can't offer: without an RDMA card, verbs. Throws
// MR_CONFIG where nothing is left, or an option can't be honoured.
Lanes make_lanes(Options& options);

}  // namespace mr
