// Control frames of the verbs lane. All go one way; a number tells what an answer is for.
//   Ask            which rails have you?                             -> Rails
//   Offer          a queue pair of ours, and the rail for yours      -> Accept
//   Fence          destroy yours: we have given up ours              -> Fenced
//   Want           the keys of a region at one of your rails         -> Keys
//   Gone           a region whose keys you have is dropped
#pragma once

#include <vector>

#include "../base/wire.h"
#include "../memory/region.h"
#include "queue_pair.h"
#include "rails.h"

namespace mr {

struct VerbsOffer {
  uint64_t number = 0;     // the client's name for the connection, never used twice on a stream
  uint32_t rail = 0;       // of the server
  uint32_t gid_index = 0;  // in the table of the server's port
  GidBytes server_gid{};   // what must stand there
  GidBytes gid{};          // the client's
  uint16_t lid = 0;
  uint8_t global = 0;
  uint32_t mtu = 0;
  uint32_t rd_atomic = 0;  // reads and atomics at a time that the client wants to begin
  QueuePairEnd end;

  Bytes encode() const;
  static VerbsOffer decode(Reader& in);
};

struct VerbsAccept {
  uint64_t number = 0;
  Status status;  // why not
  uint32_t mtu = 0, rd_atomic = 0;
  QueuePairEnd end;

  Bytes encode() const;
  static VerbsAccept decode(Reader& in);
};

struct VerbsWant {
  uint64_t number = 0;
  RegionName region;
  uint32_t right = 0;
  uint32_t rail = 0;  // of the server

  Bytes encode() const;
  static VerbsWant decode(Reader& in);
};

struct VerbsKeys {
  uint64_t number = 0;
  Status status;
  uint64_t base = 0, size = 0;  // address and length of the region
  uint64_t piece_bytes = 0;     // each key is for so many, the last for the rest
  uint8_t atomics = 0;          // the card may be asked for them
  std::vector<uint32_t> rkeys;

  Bytes encode() const;
  static VerbsKeys decode(Reader& in);
};

Bytes encode_rails(const std::vector<RailFace>& rails);
std::vector<RailFace> decode_rails(Reader& in);

}  // namespace mr
