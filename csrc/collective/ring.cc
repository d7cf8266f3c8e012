// Rings and chains: each member writes to the next one only, and each byte leaves it once (twice in an all_reduce): the
// least there can be, in as many rounds as there are members. Thakur, Rabenseifner, Gropp 2005; Patarasuk, Yuan:
// Bandwidth optimal all-reduce algorithms, 2009.
#include "plans.h"

namespace mr {
namespace {

// Round s: block (rank + ours - s) goes on to the next member, the one before it comes.
void go_round(Plan& plan, uint32_t ours, Merge merge) {
  const uint32_t size = plan.size;
  const auto block = [&](uint32_t back) {
    const uint32_t index = (plan.rank + ours + 2 * size - back) % size;
    return Blocks{index, index + 1};
  };
  for (uint32_t round = 0; round + 1 < size; ++round, plan.end_round()) {
    plan.send((plan.rank + 1) % size, block(round));
    plan.receive((plan.rank + size - 1) % size, block(round + 1), merge);
  }
}

void reduce_scatter(Plan& plan) { go_round(plan, plan.size - 1, Merge::theirs_first); }
void all_gather(Plan& plan) { go_round(plan, 0, Merge::replace); }

}  // namespace

Plan ring_reduce_scatter(uint32_t rank, uint32_t size) {
  Plan plan{rank, size, size};
  reduce_scatter(plan);
  return plan;
}

Plan ring_all_gather(uint32_t rank, uint32_t size) {
  Plan plan{rank, size, size};
  all_gather(plan);
  return plan;
}

Plan ring_all_reduce(uint32_t rank, uint32_t size) {
  Plan plan{rank, size, size};
  reduce_scatter(plan);
  all_gather(plan);
  return plan;
}

Plan chain_broadcast(uint32_t rank, uint32_t size) {
  Plan plan{rank, size, 1};
  for (uint32_t from = 0; from + 1 < size; ++from, plan.end_round()) {
    if (rank == from) plan.send(from + 1, {0, 1});
    if (rank == from + 1) plan.receive(from, {0, 1});
  }
  return plan;
}

Plan chain_reduce(uint32_t rank, uint32_t size) {
  Plan plan{rank, size, 1};
  for (uint32_t from = size - 1; from != 0; --from, plan.end_round()) {
    if (rank == from) plan.send(from - 1, {0, 1});
    if (rank == from - 1) plan.receive(from, {0, 1}, Merge::ours_first);
  }
  return plan;
}

}  // namespace mr
