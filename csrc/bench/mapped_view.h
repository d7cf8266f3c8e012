// Copies out of an owner's memory as it is mapped here, by memcpy: what a program does that has asked for the mapping
// (mr_remote_map) and reads it by itself. Nothing looks whether the owner lives or has dropped the region.
#pragma once

#include <cstdint>

#include "../engine.h"
#include "buffer.h"

namespace mr::bench {

class MappedView {
 public:
  // `size` bytes of a region of shared memory on this host. The handle must outlive it.
  MappedView(mr_remote* remote, uint64_t size);
  ~MappedView();
  MappedView(const MappedView&) = delete;

  void copy();
  const uint8_t* copied() const { return local_.data(); }

 private:
  mr_remote* const remote_;
  void* mapped_ = nullptr;
  Buffer local_;
  const uint64_t size_;
};

}  // namespace mr::bench
