// Recursive halving: in each round a member gives half of what it is still about to another one, and reduces the other
// half with what that one gives. The way back is recursive doubling. Rabenseifner: Optimization of collective reduction
// operations, 2004.
#include "plans.h"

namespace mr {
namespace {

// bounds[i]: the first block that is of the member in place i. Afterwards each has its blocks reduced.
void halve(Plan& plan, const Folding& fold, const std::vector<uint32_t>& bounds) {
  const Blocks all{0, plan.num_blocks};
  if (fold.is_extra(plan.rank)) plan.send(plan.rank - 1, all);
  if (fold.is_paired(plan.rank) && !fold.is_extra(plan.rank)) plan.receive(plan.rank + 1, all, Merge::ours_first);
  if (fold.num_extra != 0) plan.end_round();
  const uint32_t place = fold.place(plan.rank);
  for (uint32_t distance = fold.power / 2; distance != 0; distance /= 2, plan.end_round()) {
    if (fold.is_extra(plan.rank)) continue;
    const uint32_t other = place ^ distance;
    const auto half_of = [&](uint32_t whose) {
      const uint32_t first = whose / distance * distance;
      return Blocks{bounds[first], bounds[first + distance]};
    };
    plan.send(fold.rank_at(other), half_of(other));
    plan.receive(fold.rank_at(other), half_of(place), place < other ? Merge::ours_first : Merge::theirs_first);
  }
}

void double_back(Plan& plan, const Folding& fold, const std::vector<uint32_t>& bounds) {
  const uint32_t place = fold.place(plan.rank);
  for (uint32_t distance = 1; distance < fold.power; distance *= 2, plan.end_round()) {
    if (fold.is_extra(plan.rank)) continue;
    const uint32_t other = place ^ distance;
    const auto held_by = [&](uint32_t whose) {
      const uint32_t first = whose / distance * distance;
      return Blocks{bounds[first], bounds[first + distance]};
    };
    plan.send(fold.rank_at(other), held_by(place));
    plan.receive(fold.rank_at(other), held_by(other));
  }
}

void give_back(Plan& plan, const Folding& fold, Blocks blocks) {
  if (fold.is_extra(plan.rank)) plan.receive(plan.rank - 1, blocks);
  if (fold.is_paired(plan.rank) && !fold.is_extra(plan.rank)) plan.send(plan.rank + 1, blocks);
  if (fold.num_extra != 0) plan.end_round();
}

}  // namespace

Plan halving_all_reduce(uint32_t rank, uint32_t size) {
  const Folding fold(size);
  Plan plan{rank, size, fold.power};
  std::vector<uint32_t> bounds;
  for (uint32_t place = 0; place <= fold.power; ++place) bounds.push_back(place);
  halve(plan, fold, bounds);
  double_back(plan, fold, bounds);
  give_back(plan, fold, {0, fold.power});
  return plan;
}

Plan halving_reduce_scatter(uint32_t rank, uint32_t size) {
  const Folding fold(size);
  Plan plan{rank, size, size};
  std::vector<uint32_t> bounds;
  for (uint32_t place = 0; place <= fold.power; ++place) bounds.push_back(fold.rank_at(place));
  halve(plan, fold, bounds);
  const uint32_t extra = fold.is_extra(rank) ? rank : rank + 1;
  give_back(plan, fold, {extra, extra + 1});
  return plan;
}

}  // namespace mr
