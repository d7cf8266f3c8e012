// Carries out a plan (plans.h): in windows, each about what fits into a slot of every block, and in each window round
// by round. What a member sends in a round goes in pieces, straight into a channel of whoever gets it.
//
// Each member has two cursors, of what it sends and of what it gets. Both go on as far as they can: a piece is sent
// when what it is made of has come and the channel has room, and taken when it has come and all that goes out before it
// has. So sending runs ahead of getting, and of all that is left to do on all members the first in the order of
// windows, rounds and pieces can always be done.
#pragma once

#include "plans.h"
#include "steps.h"

namespace mr {

// Bytes of a block in one window: what the member gives for it, and where what comes of it goes, which may be the same.
struct BlockMemory {
  const uint8_t* given = nullptr;
  uint8_t* place = nullptr;
  uint64_t bytes = 0;
};

struct Rounds {
  Plan plan;
  uint32_t root = 0;   // whose rank is 0 in the plan
  uint64_t total = 0;  // bytes the call is about; the same on all members
  uint64_t num_windows = 1;
  std::function<BlockMemory(uint64_t window, uint32_t block)> memory = {};
};

// Runs them to the end. Throws where the group fails, which is then over.
void run_rounds(Group& group, const Call& call, const Rounds& rounds);

// Blocks that have no place in the call's tensors: one window of each.
class Scratch {
 public:
  Scratch(uint64_t num_blocks, uint64_t window) : window_(window), bytes_(new uint8_t[num_blocks * window]) {}
  uint8_t* block(uint64_t index) const { return bytes_.get() + index * window_; }

 private:
  const uint64_t window_;
  const std::unique_ptr<uint8_t[]> bytes_;
};

}  // namespace mr
