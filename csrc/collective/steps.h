// How every collective goes: in steps, each about what fits into a slot. In a step each member stages what it has for
// others in a slot of its arena, or says there where it lies (exposure.h); those who need it read it there, once,
// straight into their result or into a reduction. Where results are made from all members' pieces and needed by all,
// each member combines its part of them, puts it into the slot as well, and the others take it. Members are up to
// kStagedSteps steps apart, and steps overlap: while this one is staged, the one before is combined, and the one before
// that is taken.
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
  std::string describe(uint64_t total) const;
};

// Members that call different things would take one another's bytes for what they are not: the group fails then.
[[noreturn]] void differ(Group& group, const Member& from, const std::string& how);
void check_same_call(Group& group, const Call& call, const Member& from, const PieceHead& head, uint64_t total,
                     uint64_t number);

// Bytes of a tensor that others need.
struct Piece {
  const uint8_t* at = nullptr;
  uint64_t bytes = 0;
};

// Where what each member has for us can be read; ours is whatever the pattern puts there.
using Pieces = std::vector<const uint8_t*>;

struct Flow {
  uint64_t num_steps = 1;
  uint64_t total = 0;        // bytes the call is about; the same on all members
  int64_t giver = -1;        // the only member that stages anything; -1: all do
  int64_t taker = -1;        // the only member that takes anything
  bool by_rank = false;      // a piece for each member; else one for all
  uint64_t piece_bytes = 0;  // most bytes of a piece

  // What member `to` needs (all the others, unless by_rank): it stays as it is until the call ends.
  std::function<Piece(uint64_t step, uint32_t to)> stage;
  // Of what all have staged, makes our part of the result where it belongs, and says where that is.
  std::function<Piece(uint64_t step, Pieces& pieces)> combine;
  // Where a piece, or a combined one, of member `from` goes.
  std::function<uint8_t*(uint64_t step, uint32_t from, uint64_t bytes)> take;
  // Instead: does something with those of all givers at once.
  std::function<void(uint64_t step, Pieces& pieces)> take_all;
  // Bytes that member `from` must have staged for us; empty where `total`, which is compared, says that.
  std::function<uint64_t(uint64_t step, uint32_t from)> length;
};

// Most bytes of a piece in a group's slots.
uint64_t room_for_one(const Group& group);
uint64_t room_by_rank(const Group& group);  // a multiple of 64

// Runs it to the end. Throws where the group fails, which is then over.
void run_flow(Group& group, const Call& call, const Flow& flow);

}  // namespace mr
