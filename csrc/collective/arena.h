// What one member of a group keeps in shared memory: what it has got to, what it has to give, and what others send it.
//
//   head | kStagedSteps slots of `slot_bytes` | for each member and kind of traffic: a channel of kChannelSlots slots
//
// Members on this host map it and read the slots. Others write into its channels, one-sided. Memory that is never
// touched takes none.
#pragma once

#include "bell.h"

namespace mr {

constexpr uint32_t kStagedSteps = 4;  // steps of collectives that a member may be ahead of the slowest one
constexpr uint32_t kChannelSlots = 4;
constexpr uint32_t kMaxMembers = 1024;
constexpr uint32_t kAnyMember = 0xffffffff;

// What comes from a member through its channels: pieces of staged steps, results of combining them (both only from
// members whose slots cannot be read), and messages.
enum Traffic : uint32_t { kStaged, kCombined, kMessages, kNumTraffic };

struct Geometry {
  uint32_t size = 0;           // members
  uint64_t slot_bytes = 0;     // of a staged step, with the heads of its pieces
  uint64_t message_bytes = 0;  // of one slot of a channel of messages, with its head

  uint64_t slots() const;  // offsets and sizes in the arena
  uint64_t channel(uint32_t from, Traffic traffic) const;
  uint64_t channel_slot(Traffic traffic) const { return traffic == kMessages ? message_bytes : slot_bytes; }
  uint64_t bytes() const { return channel(size, kStaged); }
};

// In front of the bytes that one member has for others in one step, or of a part of a message.
struct alignas(64) PieceHead {
  uint64_t call;    // what was called, as a number; or the message's tag
  uint64_t total;   // bytes that the call, or the message, is about
  uint64_t bytes;   // in this piece
  uint64_t number;  // of the step, or of the piece in its channel
  uint64_t turn;    // which of the group's collectives this is
  uint64_t place;   // 0: the bytes follow; else 1 + where they lie in the memory that the member exposes
};

// Memory that a member lets others on its host read in place, during one call.
struct ExposedMemory {
  uint64_t region_id, key[2], base, size, shared_id, slot;
};

struct ArenaHead {
  uint64_t magic;
  uint32_t version, rank, size, unused;
  uint64_t slot_bytes, message_bytes;

  // 0: all is well. Else who made the group fail, and how; written once, by anybody.
  alignas(64) std::atomic<uint64_t> failure;
  std::atomic<uint32_t> left;  // 1: it has left the group, and gives nothing more
  Bell steps;                  // rung for whoever waits in a collective,
  Bell arrivals;               // for a message,
  Bell room;                   // for room in somebody's channel
  // Steps that were staged, that were combined, and in which nothing of anybody's is read any more.
  alignas(64) std::atomic<uint64_t> staged;
  std::atomic<uint64_t> turn;  // of the last collective that goes in steps
  alignas(64) std::atomic<uint64_t> combined;
  alignas(64) std::atomic<uint64_t> taken;
  alignas(64) std::atomic<uint32_t> awaits;  // rank + 1 of the member whose steps this one sleeps for; kAnyMember
  alignas(64) ExposedMemory exposed;         // written before the step whose pieces lie there is staged
};

struct alignas(64) ChannelHead {
  std::atomic<uint64_t> arrived[kChannelSlots];  // number of the piece in this slot, from 1 on
  alignas(64) std::atomic<uint64_t> consumed;    // pieces whose slot may be used again
  std::atomic<uint32_t> writers_asleep, readers_asleep;
};

struct Arena {
  ArenaHead* head = nullptr;
  Geometry geometry;

  uint8_t* bytes() const { return reinterpret_cast<uint8_t*>(head); }
  uint8_t* slot(uint64_t step) const { return bytes() + geometry.slots() + step % kStagedSteps * geometry.slot_bytes; }
  ChannelHead& channel(uint32_t from, Traffic traffic) const {
    return *reinterpret_cast<ChannelHead*>(bytes() + geometry.channel(from, traffic));
  }
  // Where piece `number` (from 0 on) of a channel goes.
  uint64_t channel_slot_offset(uint32_t from, Traffic traffic, uint64_t number) const {
    return geometry.channel(from, traffic) + sizeof(ChannelHead) +
           number % kChannelSlots * geometry.channel_slot(traffic);
  }
  uint8_t* channel_slot(uint32_t from, Traffic traffic, uint64_t number) const {
    return bytes() + channel_slot_offset(from, traffic, number);
  }
};

}  // namespace mr
