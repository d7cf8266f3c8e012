#include "plans.h"

namespace mr {

void Folding::give(Plan& plan, Blocks blocks) const {
  if (num_extra == 0) return;
  if (is_extra(plan.rank))
    plan.send(plan.rank - 1, blocks);
  else if (is_paired(plan.rank))
    plan.receive(plan.rank + 1, blocks, Merge::ours_first);
  plan.end_round();
}

void Folding::return_to(Plan& plan, Blocks blocks) const {
  if (num_extra == 0) return;
  if (is_extra(plan.rank))
    plan.receive(plan.rank - 1, blocks);
  else if (is_paired(plan.rank))
    plan.send(plan.rank + 1, blocks);
  plan.end_round();
}

}  // namespace mr
