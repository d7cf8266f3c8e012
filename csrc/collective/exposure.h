// Tensors in memory that peers on the host can map are read where they lie: what a member stages is then only a word on
// where that is. A member exposes memory for one call, in which nobody else writes to it, and the call ends when all
// have read.
#pragma once

#include "../transport/node.h"
#include "arena.h"

namespace mr {

// From this many bytes of one piece of memory on: describing and mapping it costs about as much as copying so many.
constexpr uint64_t kExposedBytes = 1u << 20;

// Whether a member puts what it gets where others still read what it gives.
bool exchanges_in_place(const mr_collective& call);

class Exposure {
 public:
  // Of the shared memory that `at` lies in, if it does, and `bytes` are enough.
  Exposure(Node& node, ArenaHead& head, const void* at, uint64_t bytes);
  ~Exposure();
  Exposure(const Exposure&) = delete;
  Exposure& operator=(const Exposure&) = delete;

  bool is_on() const { return region_ != nullptr; }
  // 1 + where in the exposed memory these bytes lie; 0: not in it.
  uint64_t place_of(const void* at, uint64_t bytes) const;

 private:
  Node& node_;
  RegionRef region_;
};

// What another member exposes, as it is mapped here.
class Exposed {
 public:
  bool is_on() const { return mapping_ != nullptr; }
  // Whether it is what the member exposes now.
  bool is(const ExposedMemory& now) const { return is_on() && region_id_ == now.region_id; }
  // The handle to map it with, given that of the member's arena.
  static RemoteRegion handle(const RemoteRegion& arena, const ExposedMemory& now);
  // Null: not mapped any more.
  std::shared_ptr<Mapping> known(uint64_t shared_id);
  // MR_PROTOCOL where the memory is not as large as the member says.
  void set(const ExposedMemory& now, std::shared_ptr<Mapping> mapping);
  // The bytes that a piece speaks of; null where they are not inside.
  const uint8_t* find(uint64_t place, uint64_t bytes) const;
  void reset() { mapping_.reset(); }  // after the call: the memory is its owner's to free

 private:
  std::shared_ptr<Mapping> mapping_;
  uint64_t region_id_ = 0, size_ = 0;
  std::unordered_map<uint64_t, std::weak_ptr<Mapping>> known_;  // by shared id, kept by the link while the memory is
};

}  // namespace mr
