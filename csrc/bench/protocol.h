// What the measuring process asks of an owner, as engine messages. The first byte of a message says what it is.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "failure.h"

namespace mr::bench {

enum : uint8_t {
  kPing = 'P',   // any bytes follow; the owner's loop thread sends them back unchanged
  kAsk = 'A',    // Request, then a region descriptor for kMirrorStart
  kAnswer = 'R'  // Answer, then a region descriptor or an error sentence
};

enum class Ask : uint32_t {
  kAllocate,     // memory of `size` bytes, filled with the pattern of `seed` -> id, address, pid, descriptor
  kFree,         // id
  kCheck,        // id: does the memory hold what a write of `size` bytes, strided like `pieces`, `run`, puts there?
  kWord,         // id -> value, the first 64-bit word
  kMirrorStart,  // do operation `op` on the asking side's region until kMirrorStop
  kMirrorStop,   // -> bytes, seconds
  kIdle,         // sleep `seconds` -> seconds (processor time), value (context switches)
  kPeakStart,
  kPeakStop,  // -> bytes (extra), value (peak)
};

enum class Memory : uint32_t { kShared, kOrdinary };

struct Request {
  Ask ask{};
  Memory memory{};
  uint32_t sparse = 0;  // kAllocate: fill only the first and the last page, leave the rest untouched
  uint32_t op = 0, depth = 0, flags = 0;
  uint32_t verify = 0;  // kMirrorStart: compare what was read
  uint64_t serial = 0;  // comes back in the answer
  uint64_t id = 0, size = 0, seed = 0, pieces = 0, run = 0;
  double seconds = 0;
};

struct Answer {
  uint32_t failed = 0;
  int32_t pid = 0;
  uint64_t serial = 0, id = 0, address = 0, bytes = 0;
  uint64_t value = 0;
  double seconds = 0;
};

using Bytes = std::vector<uint8_t>;

template <typename Head>
Bytes encode(uint8_t kind, const Head& head, const Bytes& tail) {
  Bytes bytes(1 + sizeof head + tail.size());
  bytes[0] = kind;
  std::memcpy(&bytes[1], &head, sizeof head);
  if (!tail.empty()) std::memcpy(&bytes[1 + sizeof head], tail.data(), tail.size());
  return bytes;
}

// Bytes after the head.
template <typename Head>
Bytes decode(const Bytes& bytes, Head* head) {
  if (bytes.size() < 1 + sizeof *head)
    throw Failure("a message of " + std::to_string(bytes.size()) + " bytes is too short");
  std::memcpy(head, &bytes[1], sizeof *head);
  return Bytes(bytes.begin() + 1 + sizeof *head, bytes.end());
}

}  // namespace mr::bench
