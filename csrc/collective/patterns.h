// The collectives, one file each. Each describes itself as a flow (steps.h) and runs it.
#pragma once

#include "../kernels/kernels.h"
#include "rounds.h"

namespace mr {

bool has_algorithm(uint32_t kind, uint32_t algorithm);
// Throws MR_CONFIG where a call can't be carried out in this group: before anything has begun.
void check_call(const Group& group, const mr_collective& call);
// Part of it: what is written overlaps with nothing but what it takes the place of.
void check_overlaps(const mr_collective& call, uint32_t rank);
// Carries out a checked call. Throws where the group fails, which is then over for good.
void run_collective(Group& group, const mr_collective& call, Time deadline);

void barrier(Group& group, const Call& call);
void broadcast(Group& group, const Call& call);
void all_reduce(Group& group, const Call& call);
void reduce(Group& group, const Call& call);
void reduce_scatter(Group& group, const Call& call);
void all_gather(Group& group, const Call& call);
void gather(Group& group, const Call& call);
void scatter(Group& group, const Call& call);
void all_to_all(Group& group, const Call& call);

inline const uint8_t* input(const Call& call, uint32_t index) {
  return static_cast<const uint8_t*>(call.what.inputs[index]);
}
inline uint8_t* output(const Call& call, uint32_t index) { return static_cast<uint8_t*>(call.what.outputs[index]); }

// All members write straight to each other (steps.h); else by a plan (plans.h).
inline bool is_direct(const Group& group, const Call& call) {
  return call.what.algorithm == MR_DIRECT || group.size() == 1;
}

// Our rank in a plan.
inline uint32_t from_root(const Group& group, const Call& call) {
  return (group.rank() + group.size() - call.what.root) % group.size();
}

// out = the reduction over the shards, in the order of ranks.
void reduce_shards(const Call& call, const Pieces& shards, uint8_t* out, uint64_t bytes);

// In a plan two at a time are reduced. Who averages divides what each member gives, which is then added up: a sum of
// all might be too large for the dtype.
bool averages(const Call& call);
void give(const Group& group, const Call& call, uint8_t* out, const uint8_t* given, uint64_t bytes);
void combine(const Call& call, const uint8_t* first, const uint8_t* second, uint8_t* out, uint64_t bytes);

// Step i is about bytes [i * window, (i + 1) * window) of `bytes`: how many are there?
struct Windows {
  uint64_t window;

  uint64_t steps(uint64_t bytes) const { return (bytes + window - 1) / window; }
  uint64_t at(uint64_t step) const { return step * window; }
  uint64_t length(uint64_t bytes, uint64_t step) const {
    return at(step) >= bytes ? 0 : std::min(window, bytes - at(step));
  }
  Piece piece(const uint8_t* tensor, uint64_t bytes, uint64_t step) const {
    return {tensor + at(step), length(bytes, step)};
  }
};

// Nothing where they are the same memory.
inline void copy(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  if (bytes != 0 && to != from) std::memmove(to, from, bytes);
}

}  // namespace mr
