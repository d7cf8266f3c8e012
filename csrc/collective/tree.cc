// Binomial trees: the member at distance 2^k from its parent has the 2^k ranks from its own on below it. Thakur,
// Rabenseifner, Gropp 2005.
#include <algorithm>

#include "plans.h"

namespace mr {
namespace {

// From the leaves to the root; `blocks_of` says what the members [first, end) have together.
template <typename BlocksOf>
Plan up(Plan plan, Merge merge, BlocksOf&& blocks_of) {
  const uint32_t rank = plan.rank, size = plan.size;
  for (uint32_t distance = 1; distance < size; distance *= 2, plan.end_round()) {
    const auto below = [&](uint32_t whose) { return blocks_of(whose, std::min(size, whose + distance)); };
    if (rank % (2 * distance) == distance) plan.send(rank - distance, below(rank));
    if (rank % (2 * distance) == 0 && rank + distance < size)
      plan.receive(rank + distance, below(rank + distance), merge);
  }
  return plan;
}

// From the root to the leaves: the same backwards.
template <typename BlocksOf>
Plan down(Plan plan, BlocksOf&& blocks_of) {
  const uint32_t rank = plan.rank, size = plan.size;
  for (uint32_t distance = std::bit_ceil(size) / 2; distance != 0; distance /= 2, plan.end_round()) {
    const auto below = [&](uint32_t whose) { return blocks_of(whose, std::min(size, whose + distance)); };
    if (rank % (2 * distance) == distance) plan.receive(rank - distance, below(rank));
    if (rank % (2 * distance) == 0 && rank + distance < size) plan.send(rank + distance, below(rank + distance));
  }
  return plan;
}

Blocks the_one(uint32_t, uint32_t) { return {0, 1}; }
Blocks theirs(uint32_t first, uint32_t end) { return {first, end}; }

}  // namespace

Plan tree_broadcast(uint32_t rank, uint32_t size) { return down({rank, size, 1}, the_one); }
Plan tree_reduce(uint32_t rank, uint32_t size) { return up({rank, size, 1}, Merge::ours_first, the_one); }
Plan tree_gather(uint32_t rank, uint32_t size) { return up({rank, size, size}, Merge::replace, theirs); }
Plan tree_scatter(uint32_t rank, uint32_t size) { return down({rank, size, size}, theirs); }

}  // namespace mr
