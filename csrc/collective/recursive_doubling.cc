// Recursive doubling: in each round a member exchanges all that it has with one that is twice as far away, so that
// log2(members) rounds do. Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH,
// 2005.
#include "plans.h"

namespace mr {

Plan doubling_all_reduce(uint32_t rank, uint32_t size) {
  const Folding fold(size);
  const Blocks all{0, 1};
  Plan plan{rank, size, 1};
  fold.give(plan, all);
  const uint32_t place = fold.place(rank);
  for (uint32_t distance = 1; distance < fold.power; distance *= 2, plan.end_round()) {
    if (fold.is_extra(rank)) continue;
    const uint32_t other = place ^ distance;
    plan.send(fold.rank_at(other), all);
    plan.receive(fold.rank_at(other), all, place < other ? Merge::ours_first : Merge::theirs_first);
  }
  fold.return_to(plan, all);
  return plan;
}

}  // namespace mr
