// How every collective goes: in steps, each about what fits into a slot. In a step each member stages what it has for
// others in a slot of its arena; those who need it read it there, once, straight into their result or into a reduction.
// Where results are made from all members' pieces and needed by all, each member combines its part of them, puts it
// into the slot as well, and the others take it. Members are up to kStagedSteps steps apart, and steps overlap: while
// this one is staged, the one before is combined, and the one before that is taken.
//
// Between members that are not direct the same pieces are written, one-sided, into channels of whoever needs them.
#pragma once

#include <functional>

#include "group.h"

namespace mr {

// What a member asks for, checked; the same on all members, up to the memory.
struct Call {
  const mr_collective& what;
  Time deadline;

  uint64_t number() const;  // what was called, but for its size: the same on all members
  std::string text() const;
};

// What stands in a slot for us from each member; ours is whatever the pattern puts there.
using Pieces = std::vector<const uint8_t*>;

struct Flow {
  uint64_t num_steps = 1;
  uint64_t total = 0;        // bytes the call is about; the same on all members
  int64_t giver = -1;        // the only member that stages anything; -1: all do
  int64_t taker = -1;        // the only member that takes anything
  bool by_rank = false;      // a piece for each member; else one for all
  uint64_t piece_bytes = 0;  // most bytes of a piece

  // Puts what member `to` needs (all the others, unless by_rank) into `piece`; returns how many bytes that is.
  std::function<uint64_t(uint64_t step, uint32_t to, uint8_t* piece)> stage;
  // Of what all have staged, makes our part of the result in `out`; returns its bytes.
  std::function<uint64_t(uint64_t step, Pieces& pieces, uint8_t* out)> combine;
  // With a piece, or a combined one, of member `from`.
  std::function<void(uint64_t step, uint32_t from, const uint8_t* piece, uint64_t bytes)> take;
  // Instead: with those of all givers at once.
  std::function<void(uint64_t step, Pieces& pieces)> take_all;
};

// Most bytes of a piece in a group's slots.
uint64_t room_for_one(const Group& group);
uint64_t room_by_rank(const Group& group);  // a multiple of 64

// Runs it to the end. Throws where the group fails, which is then over.
void run_flow(Group& group, const Call& call, const Flow& flow);

}  // namespace mr
