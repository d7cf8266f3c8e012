// Bytes on their way out of a data socket: runs of memory behind Chunk heads, collected for one system call. Only runs
// that are too short for a part of their own are packed.
#pragma once

#include <sys/uio.h>

#include "../base/error.h"
#include "tcp_wire.h"

namespace mr::tcp {

constexpr int kMaxParts = 512;              // of one scatter or gather call; the kernel's own limit is 1024
constexpr size_t kPackBelow = 1024;         // measured: a shorter run is copied faster than it is made a part of a call
constexpr size_t kStagingBytes = 64 << 10;  // for packed runs

// Collects the parts of one gather call.
class Gather {
 public:
  Gather(uint8_t* staging, uint64_t limit) : staging_(staging), limit_(limit) {}

  // Each returns false once the call is full; what has been added so far stays.
  bool copy(const void* data, size_t length);
  bool memory(const uint8_t* base, Cursor cursor, uint64_t length);
  bool zeros(uint64_t length);

  const iovec* parts() const { return parts_; }
  int count() const { return count_; }
  uint64_t bytes() const { return bytes_; }

 private:
  bool full() const { return count_ == kMaxParts || bytes_ >= limit_; }
  bool refer(const uint8_t* data, size_t length);

  uint8_t* const staging_;
  const uint64_t limit_;
  uint64_t bytes_ = 0;
  size_t staged_ = 0;
  int count_ = 0;
  iovec parts_[kMaxParts];
};

// Bytes on their way out behind Chunk heads, the last one marked.
class ChunkSender {
 public:
  // Of memory; the view must outlive this.
  ChunkSender(uint32_t id, const uint8_t* base, const View& view, uint64_t begin, uint64_t length);
  // Just an end.
  ChunkSender(uint32_t id, Status end, bool touched);

  bool gather(Gather& out) const;  // false: more may follow once that has been sent
  size_t sent(size_t length);      // returns what is left of `length`
  uint32_t id() const { return head_.id; }
  bool done() const { return done_; }
  // A chunk has begun that only the memory can fill.
  bool needs_memory() const { return head_.last == 0 && inside_chunk(); }
  // Ends with a failure, at the end of the chunk at hand if a part of it has left, else at once.
  void end_early(Status end);
  // The memory must not be read any more: zeros fill up the chunk at hand.
  void lose_memory() { base_ = nullptr; }

 private:
  void begin_chunk();
  bool inside_chunk() const { return head_left_ < sizeof head_; }

  Chunk head_;
  size_t head_left_ = 0;       // of the chunk at hand, not sent
  uint64_t payload_left_ = 0;  // likewise
  uint64_t bytes_left_ = 0;    // behind the chunk at hand
  const uint8_t* base_ = nullptr;
  Cursor cursor_;
  Status end_;
  bool done_ = false;
};

}  // namespace mr::tcp
