// The plans of collectives, carried out in memory for groups of any size: what each member has in the end, in which
// order it was summed, and how many rounds, messages and blocks that took.
#include <algorithm>
#include <numeric>
#include <string>

#include "../../csrc/collective/plans.h"
#include "check.h"

namespace {

using namespace mr;

constexpr uint32_t kLargest = 34;

// What a member has of each block: whose contributions, as a text that says in which order they were put together.
using Held = std::vector<std::string>;
using Block = uint32_t (*)(uint32_t rank, uint32_t size, uint32_t block);  // which block of all this is

uint32_t as_numbered(uint32_t, uint32_t, uint32_t block) { return block; }
uint32_t from_ours(uint32_t rank, uint32_t size, uint32_t block) { return (rank + block) % size; }

struct Outcome {
  std::vector<Plan> plans;
  std::vector<Held> held;
};

// `given`: what a member has of a block in the beginning.
template <typename Given>
Outcome carry_out(Plan (*plan_of)(uint32_t, uint32_t), uint32_t size, Given&& given, Block number = as_numbered) {
  Outcome out;
  for (uint32_t rank = 0; rank < size; ++rank) {
    out.plans.push_back(plan_of(rank, size));
    const Plan& plan = out.plans.back();
    CHECK_EQ(plan.num_rounds, out.plans[0].num_rounds);
    CHECK_EQ(plan.num_blocks, out.plans[0].num_blocks);
    out.held.emplace_back();
    for (uint32_t block = 0; block < plan.num_blocks; ++block) out.held[rank].push_back(given(rank, block));
  }
  size_t taken = 0, sent = 0;
  for (uint32_t round = 0; round < out.plans[0].num_rounds; ++round) {
    const std::vector<Held> before = out.held;  // who sends does so before it takes
    for (const Plan& plan : out.plans)
      for (const Move& get : plan.receives) {
        if (get.round != round) continue;
        const Plan& giver = out.plans[get.peer];
        const auto is_it = [&](const Move& move) { return move.round == round && move.peer == plan.rank; };
        const auto send = std::find_if(giver.sends.begin(), giver.sends.end(), is_it);
        CHECK(send != giver.sends.end());
        CHECK_EQ(send->blocks.end - send->blocks.first, get.blocks.end - get.blocks.first);
        for (uint32_t i = 0; i < get.blocks.end - get.blocks.first; ++i) {
          const uint32_t here = get.blocks.first + i, there = send->blocks.first + i;
          CHECK_EQ(number(plan.rank, size, here), number(giver.rank, size, there));
          const std::string &ours = before[plan.rank][here], &theirs = before[giver.rank][there];
          CHECK(!theirs.empty());
          out.held[plan.rank][here] = get.merge == Merge::replace      ? theirs
                                      : get.merge == Merge::ours_first ? "(" + ours + theirs + ")"
                                                                       : "(" + theirs + ours + ")";
        }
        ++taken;
      }
  }
  for (const Plan& plan : out.plans) {
    sent += plan.sends.size();
    for (uint32_t round = 0; round < plan.num_rounds; ++round)
      for (const auto& moves : {plan.sends, plan.receives})
        CHECK(std::count_if(moves.begin(), moves.end(), [&](const Move& move) { return move.round == round; }) <= 1);
  }
  CHECK_EQ(taken, sent);
  return out;
}

std::string name(uint32_t rank) { return std::string(1, static_cast<char>('0' + rank)); }
std::string own(uint32_t rank, uint32_t) { return name(rank); }

std::string sum_of(Plan (*plan_of)(uint32_t, uint32_t), uint32_t size, uint32_t rank, uint32_t block) {
  return carry_out(plan_of, size, own).held[rank][block];
}

// All members' names, each once: whatever the order.
std::string sorted(std::string text) {
  std::erase_if(text, [](char each) { return each == '(' || each == ')'; });
  std::sort(text.begin(), text.end());
  return text;
}
std::string everybody(uint32_t size) {
  std::string out;
  for (uint32_t rank = 0; rank < size; ++rank) out += name(rank);
  return out;
}

uint32_t log2_up(uint32_t size) { return static_cast<uint32_t>(std::bit_width(size - 1)); }

uint32_t most_sends(const Outcome& outcome) {
  size_t most = 0;
  for (const Plan& plan : outcome.plans) most = std::max(most, plan.sends.size());
  return static_cast<uint32_t>(most);
}

uint32_t most_blocks_sent(const Outcome& outcome) {
  uint32_t most = 0;
  for (const Plan& plan : outcome.plans) {
    uint32_t blocks = 0;
    for (const Move& move : plan.sends) blocks += move.blocks.end - move.blocks.first;
    most = std::max(most, blocks);
  }
  return most;
}

void all_have_the_same_sums(const Outcome& outcome, uint32_t size) {
  for (const Held& held : outcome.held) CHECK(held == outcome.held[0]);
  for (const std::string& block : outcome.held[0]) CHECK_EQ(sorted(block), everybody(size));
}

TEST(all_reduce_gives_all_the_same_sums) {
  for (uint32_t size = 2; size <= kLargest; ++size)
    for (const auto plan_of : {doubling_all_reduce, halving_all_reduce, ring_all_reduce})
      all_have_the_same_sums(carry_out(plan_of, size, own), size);
}

TEST(doubling_takes_log2_rounds) {
  for (uint32_t size = 2; size <= kLargest; ++size) {
    const Outcome outcome = carry_out(doubling_all_reduce, size, own);
    const uint32_t expected = std::bit_width(size) - 1 + (std::has_single_bit(size) ? 0 : 2);
    CHECK_EQ(outcome.plans[0].num_rounds, expected);
    CHECK(most_sends(outcome) <= log2_up(size));
  }
}

TEST(halving_sends_what_it_must_in_two_log2_messages) {
  for (uint32_t size = 2; size <= kLargest; ++size) {
    const Outcome outcome = carry_out(halving_all_reduce, size, own);
    const uint32_t power = std::bit_floor(size);
    CHECK(most_sends(outcome) <= 2 * log2_up(size));
    CHECK(most_blocks_sent(outcome) <= 2 * (power - 1) + (power == size ? 0 : power));
  }
}

TEST(a_ring_sends_to_one_member) {
  for (uint32_t size = 2; size <= kLargest; ++size)
    for (const auto plan_of : {ring_all_reduce, ring_all_gather, ring_reduce_scatter}) {
      for (uint32_t rank = 0; rank < size; ++rank)
        for (const Move& move : plan_of(rank, size).sends) CHECK_EQ(move.peer, (rank + 1) % size);
      const Outcome outcome = carry_out(plan_of, size, own);
      CHECK_EQ(most_blocks_sent(outcome), (plan_of == ring_all_reduce ? 2 : 1) * (size - 1));
    }
}

TEST(the_orders_of_sums_are_those_of_the_docs) {
  CHECK_EQ(sum_of(doubling_all_reduce, 4, 3, 0), "((01)(23))");
  CHECK_EQ(sum_of(doubling_all_reduce, 5, 4, 0), "(((01)2)(34))");
  CHECK_EQ(sum_of(halving_all_reduce, 4, 1, 2), "((02)(13))");
  CHECK_EQ(sum_of(ring_all_reduce, 4, 0, 1), "(((23)0)1)");
  CHECK_EQ(sum_of(tree_reduce, 5, 0, 0), "(((01)(23))4)");
  CHECK_EQ(sum_of(chain_reduce, 4, 0, 0), "(0(1(23)))");
}

TEST(reduce_scatter_gives_each_its_block) {
  for (uint32_t size = 2; size <= kLargest; ++size)
    for (const auto plan_of : {halving_reduce_scatter, ring_reduce_scatter}) {
      const Outcome outcome = carry_out(plan_of, size, own);
      for (uint32_t rank = 0; rank < size; ++rank) CHECK_EQ(sorted(outcome.held[rank][rank]), everybody(size));
    }
}

TEST(all_gather_gives_all_to_all) {
  for (uint32_t size = 2; size <= kLargest; ++size) {
    const auto ours = [](uint32_t rank, uint32_t block) { return block == rank ? name(rank) : ""; };
    const Outcome ring = carry_out(ring_all_gather, size, ours);
    for (const Held& held : ring.held)
      for (uint32_t block = 0; block < size; ++block) CHECK_EQ(held[block], name(block));
    const auto first = [](uint32_t rank, uint32_t block) { return block == 0 ? name(rank) : ""; };
    const Outcome outcome = carry_out(dissemination, size, first, from_ours);
    for (uint32_t rank = 0; rank < size; ++rank)
      for (uint32_t block = 0; block < size; ++block) CHECK_EQ(outcome.held[rank][block], name((rank + block) % size));
    CHECK_EQ(outcome.plans[0].num_rounds, log2_up(size));
    CHECK_EQ(most_blocks_sent(outcome), size - 1);
  }
}

TEST(broadcast_and_reduce_reach_all) {
  for (uint32_t size = 2; size <= kLargest; ++size) {
    const auto of_root = [](uint32_t rank, uint32_t) { return rank == 0 ? "0" : ""; };
    for (const auto plan_of : {tree_broadcast, chain_broadcast}) {
      const Outcome outcome = carry_out(plan_of, size, of_root);
      for (const Held& held : outcome.held) CHECK_EQ(held[0], "0");
    }
    for (const auto plan_of : {tree_reduce, chain_reduce})
      CHECK_EQ(sorted(sum_of(plan_of, size, 0, 0)), everybody(size));
    CHECK_EQ(most_sends(carry_out(tree_broadcast, size, of_root)), log2_up(size));
    CHECK_EQ(most_sends(carry_out(chain_broadcast, size, of_root)), 1u);
  }
}

TEST(gather_and_scatter_in_log2_rounds) {
  for (uint32_t size = 2; size <= kLargest; ++size) {
    const auto ours = [](uint32_t rank, uint32_t block) { return block == rank ? name(rank) : ""; };
    const Outcome gathered = carry_out(tree_gather, size, ours);
    for (uint32_t block = 0; block < size; ++block) CHECK_EQ(gathered.held[0][block], name(block));
    const auto of_root = [](uint32_t rank, uint32_t block) { return rank == 0 ? name(block) : ""; };
    const Outcome scattered = carry_out(tree_scatter, size, of_root);
    for (uint32_t rank = 0; rank < size; ++rank) CHECK_EQ(scattered.held[rank][rank], name(rank));
    CHECK_EQ(gathered.plans[0].num_rounds, log2_up(size));
    CHECK_EQ(scattered.plans[0].num_rounds, log2_up(size));
  }
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
