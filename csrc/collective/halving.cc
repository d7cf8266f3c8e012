// Recursive halving: in each round a member gives half of what it is still about to another one, and reduces the other
// half with what that one gives. The way back is recursive doubling. Rabenseifner: Optimization of collective reduction
// operations, 2004.
#include "plans.h"

namespace mr {
namespace {

// bounds[i]: the first block that is of the member in place i. What those have together that agree with `place` but for
// places below `distance`:
using Bounds = std::vector<uint32_t>;
Blocks around(const Bounds& bounds, uint32_t place, uint32_t distance) {
  const uint32_t first = place / distance * distance;
  return {bounds[first], bounds[first + distance]};
}

// Afterwards each has its blocks reduced.
void halve(Plan& plan, const Folding& fold, const Bounds& bounds) {
  fold.give(plan, {0, plan.num_blocks});
  const uint32_t place = fold.place(plan.rank);
  for (uint32_t distance = fold.power / 2; distance != 0; distance /= 2, plan.end_round()) {
    if (fold.is_extra(plan.rank)) continue;
    const uint32_t other = place ^ distance;
    plan.send(fold.rank_at(other), around(bounds, other, distance));
    plan.receive(fold.rank_at(other), around(bounds, place, distance),
                 place < other ? Merge::ours_first : Merge::theirs_first);
  }
}

void double_back(Plan& plan, const Folding& fold, const Bounds& bounds) {
  const uint32_t place = fold.place(plan.rank);
  for (uint32_t distance = 1; distance < fold.power; distance *= 2, plan.end_round()) {
    if (fold.is_extra(plan.rank)) continue;
    const uint32_t other = place ^ distance;
    plan.send(fold.rank_at(other), around(bounds, place, distance));
    plan.receive(fold.rank_at(other), around(bounds, other, distance));
  }
}

}  // namespace

Plan halving_all_reduce(uint32_t rank, uint32_t size) {
  const Folding fold(size);
  Plan plan{rank, size, fold.power};
  Bounds bounds;
  for (uint32_t place = 0; place <= fold.power; ++place) bounds.push_back(place);
  halve(plan, fold, bounds);
  double_back(plan, fold, bounds);
  fold.return_to(plan, {0, fold.power});
  return plan;
}

Plan halving_reduce_scatter(uint32_t rank, uint32_t size) {
  const Folding fold(size);
  Plan plan{rank, size, size};
  Bounds bounds;
  for (uint32_t place = 0; place <= fold.power; ++place) bounds.push_back(fold.rank_at(place));
  halve(plan, fold, bounds);
  const uint32_t extra = fold.is_extra(rank) ? rank : rank + 1;
  fold.return_to(plan, {extra, extra + 1});
  return plan;
}

}  // namespace mr
