// Algorithms for members on many hosts, each of which should write to few others: which blocks a member sends to whom
// and gets from whom, round by round. One file a pattern; rounds.h carries them out.
//
// A call's bytes are cut into blocks, whose sizes may differ. Ranks here count from the root, which is 0. In a round a
// member sends to one other at most and gets from one; what it sends and what it gets are the same blocks or none in
// common, and it sends before it takes what it gets.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace mr {

struct Blocks {
  uint32_t first, end;

  bool operator==(const Blocks&) const = default;
  bool meets(const Blocks& other) const { return first < other.end && other.first < end; }
};

// What becomes of bytes that come: they take the place of ours, or are reduced with them, in this order.
enum class Merge : uint8_t { replace, ours_first, theirs_first };

struct Move {
  uint32_t round, peer;
  Blocks blocks;
  Merge merge = Merge::replace;
};

struct Plan {
  uint32_t rank, size, num_blocks, num_rounds = 0;
  std::vector<Move> sends = {}, receives = {};

  void send(uint32_t to, Blocks blocks) { sends.push_back({num_rounds, to, blocks}); }
  void receive(uint32_t from, Blocks blocks, Merge merge = Merge::replace) {
    receives.push_back({num_rounds, from, blocks, merge});
  }
  void end_round() { ++num_rounds; }
};

// All members have the reduction of the one block.
Plan doubling_all_reduce(uint32_t rank, uint32_t size);
// Of as many blocks as the largest power of two that there are members for.
Plan halving_all_reduce(uint32_t rank, uint32_t size);
// Block r is rank r's.
Plan halving_reduce_scatter(uint32_t rank, uint32_t size);

// Block r is rank r's.
Plan ring_all_reduce(uint32_t rank, uint32_t size);
Plan ring_reduce_scatter(uint32_t rank, uint32_t size);
Plan ring_all_gather(uint32_t rank, uint32_t size);
// One block.
Plan chain_broadcast(uint32_t rank, uint32_t size);
Plan chain_reduce(uint32_t rank, uint32_t size);

// One block.
Plan tree_broadcast(uint32_t rank, uint32_t size);
Plan tree_reduce(uint32_t rank, uint32_t size);
// Block r is rank r's.
Plan tree_gather(uint32_t rank, uint32_t size);
Plan tree_scatter(uint32_t rank, uint32_t size);

// Block i is that of rank (rank + i) modulo size. Of no bytes it is a barrier.
Plan dissemination(uint32_t rank, uint32_t size);

// Where there are not as many members as a power of two, those that are too many give what they have to one of the
// others before, and get the result from it: even and odd ranks below 2 * num_extra are pairs.
struct Folding {
  uint32_t power, num_extra;

  explicit Folding(uint32_t size) : power(std::bit_floor(size)), num_extra(size - power) {}
  bool is_paired(uint32_t rank) const { return rank < 2 * num_extra; }
  bool is_extra(uint32_t rank) const { return is_paired(rank) && rank % 2 == 1; }
  uint32_t place(uint32_t rank) const { return is_paired(rank) ? rank / 2 : rank - num_extra; }
  uint32_t rank_at(uint32_t place) const { return place < num_extra ? 2 * place : place + num_extra; }

  void give(Plan& plan, Blocks blocks) const;       // what those that are too many have,
  void return_to(Plan& plan, Blocks blocks) const;  // and what they get
};

}  // namespace mr
