#include "patterns.h"

namespace mr {
namespace {

// Up to this many bytes from all members together each reads all of them: one round. Beyond, each reduces its part and
// reads the others' results: two rounds, but fewer bytes.
constexpr uint64_t kOneRoundBytes = 32 << 10;
static_assert(kOneRoundBytes < kExposedBytes);  // in one round others still read what is overwritten here

void in_one_round(Group& group, const Call& call, uint64_t bytes) {
  Flow flow;
  flow.total = bytes;
  flow.piece_bytes = room_for_one(group);
  flow.stage = [&](uint64_t, uint32_t) { return Piece{input(call, 0), bytes}; };
  flow.take_all = [&](uint64_t, Pieces& pieces) {
    pieces[group.rank()] = input(call, 0);
    reduce_shards(call, pieces, output(call, 0), bytes);
  };
  run_flow(group, call, flow);
}

// Who reduces what: rank r has [at(r), at(r) + length(r)) of the bytes.
struct Parts {
  uint64_t bytes, part;

  Parts(uint64_t bytes, uint64_t size) : bytes(bytes), part((bytes + size * 64 - 1) / (size * 64) * 64) {}
  uint64_t at(uint64_t rank) const { return std::min(bytes, rank * part); }
  uint64_t length(uint64_t rank) const { return at(rank + 1) - at(rank); }
};

void in_two_rounds(Group& group, const Call& call, uint64_t bytes) {
  const uint32_t size = group.size(), rank = group.rank();
  const Windows windows{room_by_rank(group) * size};
  const auto parts = [&](uint64_t step) { return Parts(windows.length(bytes, step), size); };
  Flow flow;
  flow.total = bytes;
  flow.by_rank = true;
  flow.piece_bytes = room_by_rank(group);
  flow.num_steps = windows.steps(bytes);
  flow.stage = [&](uint64_t step, uint32_t to) {
    const Parts of = parts(step);
    return Piece{input(call, 0) + windows.at(step) + of.at(to), of.length(to)};
  };
  flow.combine = [&](uint64_t step, Pieces& pieces) {
    const Parts of = parts(step);
    const uint64_t at = windows.at(step) + of.at(rank);
    pieces[rank] = input(call, 0) + at;
    reduce_shards(call, pieces, output(call, 0) + at, of.length(rank));
    return Piece{output(call, 0) + at, of.length(rank)};
  };
  flow.take = [&](uint64_t step, uint32_t from, uint64_t) {
    return output(call, 0) + windows.at(step) + parts(step).at(from);
  };
  run_flow(group, call, flow);
}

Plan plan_of(uint32_t algorithm, uint32_t rank, uint32_t size) {
  if (algorithm == MR_DOUBLING) return doubling_all_reduce(rank, size);
  return algorithm == MR_HALVING ? halving_all_reduce(rank, size) : ring_all_reduce(rank, size);
}

void in_rounds(Group& group, const Call& call, uint64_t bytes) {
  Rounds rounds{plan_of(call.what.algorithm, group.rank(), group.size())};
  const Parts parts(bytes, rounds.plan.num_blocks);
  rounds.total = bytes;
  rounds.memory = [&](uint64_t, uint32_t block) {
    return BlockMemory{input(call, 0) + parts.at(block), output(call, 0) + parts.at(block), parts.length(block)};
  };
  run_rounds(group, call, rounds);
}

}  // namespace

void all_reduce(Group& group, const Call& call) {
  const uint64_t bytes = call.what.input_bytes[0];
  if (!is_direct(group, call)) return in_rounds(group, call, bytes);
  if (bytes == 0) return barrier(group, call);
  if (bytes * group.size() <= kOneRoundBytes && bytes <= room_for_one(group)) return in_one_round(group, call, bytes);
  in_two_rounds(group, call, bytes);
}

}  // namespace mr
