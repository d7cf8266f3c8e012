// Collectives and messages between engines of one process: in memory that they share, and over sockets.
#include <atomic>
#include <chrono>
#include <numeric>

#include "check.h"
#include "group_side.h"

namespace {

constexpr uint32_t kI32 = 3, kF32 = 5;  // enum mr_dtype

void over_tcp(mr_options& options) { options.lanes = "tcp"; }
void (*const kWays[])(mr_options&) = {nullptr, over_tcp};

constexpr std::pair<void (*)(mr_options&), uint32_t> kWaysAndAlgorithms[] = {
    {nullptr, MR_DIRECT},  {over_tcp, MR_DIRECT},  {nullptr, MR_DOUBLING}, {over_tcp, MR_DOUBLING},
    {nullptr, MR_HALVING}, {over_tcp, MR_HALVING}, {nullptr, MR_RING},     {over_tcp, MR_RING}};

using Ints = std::vector<int32_t>;
GroupMember::Memory memory(Ints& ints) { return {ints.data(), ints.size() * sizeof(int32_t)}; }

int32_t value(uint32_t rank, size_t index) { return static_cast<int32_t>(rank * 1000003 + index * 7919 % 65521); }
Ints numbers(uint32_t rank, size_t count, size_t from = 0) {
  Ints out(count);
  for (size_t i = 0; i < count; ++i) out[i] = value(rank, from + i);
  return out;
}
void demand(int kind, const GroupMember& member) {
  if (kind != MR_OK) throw std::runtime_error(member.error.message);
}

// Around the sizes at which steps and parts begin; 64 bytes are 16 numbers.
const size_t kCounts[] = {0, 1, 15, 16, 17, 63, 64, 65, 257, 5000};

void check_all(GroupOf& group, uint32_t size, size_t count) {
  group.each([&](GroupMember& member) {
    const uint32_t rank = member.rank, root = size - 1;
    Ints sum(count), mine = numbers(rank, count);
    for (size_t i = 0; i < count; ++i)
      for (uint32_t each = 0; each < size; ++each)
        sum[i] = static_cast<int32_t>(static_cast<uint32_t>(sum[i]) + static_cast<uint32_t>(value(each, i)));

    demand(member.run(MR_BARRIER, {}, {}), member);
    Ints out = mine;
    demand(member.run(MR_ALL_REDUCE, {memory(out)}, {memory(out)}, 0, kI32, MR_SUM), member);
    CHECK(out == sum);

    Ints reduced(count);
    std::vector<GroupMember::Memory> to_root;
    if (rank == root) to_root.push_back(memory(reduced));
    demand(member.run(MR_REDUCE, {memory(mine)}, to_root, root, kI32, MR_SUM), member);
    if (rank == root) CHECK(reduced == sum);

    Ints copy = numbers(0, count);
    rank == 0 ? demand(member.run(MR_BROADCAST, {memory(copy)}, {}), member)
              : (copy.assign(count, 0), demand(member.run(MR_BROADCAST, {}, {memory(copy)}), member));
    CHECK(copy == numbers(0, count));

    // Uneven: rank r gives count + r numbers.
    Ints given = numbers(rank, count + rank);
    std::vector<Ints> gathered;
    std::vector<GroupMember::Memory> into;
    for (uint32_t each = 0; each < size; ++each) gathered.emplace_back(count + each);
    for (Ints& each : gathered) into.push_back(memory(each));
    demand(member.run(MR_ALL_GATHER, {memory(given)}, into), member);
    for (uint32_t each = 0; each < size; ++each) CHECK(gathered[each] == numbers(each, count + each));

    std::vector<Ints> collected(size, Ints(count));
    into.clear();
    for (Ints& each : collected)
      if (rank == root) into.push_back(memory(each));
    demand(member.run(MR_GATHER, {memory(mine)}, into, root), member);
    for (uint32_t each = 0; rank == root && each < size; ++each) CHECK(collected[each] == numbers(each, count));

    std::vector<Ints> dealt;
    std::vector<GroupMember::Memory> from;
    for (uint32_t each = 0; each < size; ++each) dealt.push_back(numbers(each + 10, count));
    for (Ints& each : dealt)
      if (rank == root) from.push_back(memory(each));
    Ints got(count);
    demand(member.run(MR_SCATTER, from, {memory(got)}, root), member);
    CHECK(got == numbers(rank + 10, count));

    // Rank s has count + s + 2r numbers for rank r: in all_to_all, and the same for all givers in reduce_scatter.
    std::vector<Ints> sent, received;
    std::vector<GroupMember::Memory> all_in, all_out;
    for (uint32_t each = 0; each < size; ++each) {
      sent.push_back(numbers(rank * size + each, count + rank + 2 * each));
      received.emplace_back(count + each + 2 * rank);
    }
    for (Ints& each : sent) all_in.push_back(memory(each));
    for (Ints& each : received) all_out.push_back(memory(each));
    demand(member.run(MR_ALL_TO_ALL, all_in, all_out), member);
    for (uint32_t each = 0; each < size; ++each)
      CHECK(received[each] == numbers(each * size + rank, count + each + 2 * rank));

    std::vector<Ints> shards;
    all_in.clear();
    for (uint32_t each = 0; each < size; ++each) shards.push_back(numbers(rank, count + 3 * each));
    for (Ints& each : shards) all_in.push_back(memory(each));
    Ints shard(count + 3 * rank), expected(shard.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = value(0, i);
      for (uint32_t each = 1; each < size; ++each) expected[i] = std::max(expected[i], value(each, i));
    }
    demand(member.run(MR_REDUCE_SCATTER, all_in, {memory(shard)}, 0, kI32, MR_MAX), member);
    CHECK(shard == expected);
  });
}

constexpr uint32_t kAlgorithms[] = {MR_DIRECT, MR_DOUBLING, MR_HALVING, MR_RING, MR_TREE};

void check_sizes(uint32_t size, uint64_t step_bytes) {
  for (const auto way : kWays) {
    GroupOf group(size, step_bytes, way);
    for (const uint32_t algorithm : kAlgorithms) {
      for (const auto& member : group.members) member->algorithm = algorithm;
      for (const size_t count : kCounts) check_all(group, size, count);
    }
  }
}

TEST(one_member) { check_sizes(1, 256); }
TEST(two_members_small_steps) { check_sizes(2, 64); }
TEST(two_members) { check_sizes(2, 4096); }
TEST(three_members) { check_sizes(3, 192); }
TEST(four_members) { check_sizes(4, 1024); }
TEST(more_members_by_rounds) {
  for (const uint32_t size : {5, 7, 9}) {
    GroupOf group(size, 576, over_tcp);
    for (const uint32_t algorithm : {MR_DOUBLING, MR_HALVING, MR_RING, MR_TREE}) {
      for (const auto& member : group.members) member->algorithm = algorithm;
      for (const size_t count : {0, 17, 700}) check_all(group, size, count);
    }
  }
}

// Collectives that go other ways one after the other.
TEST(algorithms_take_turns) {
  GroupOf group(6, 512);
  for (size_t round = 0; round < 40; ++round) {
    for (const auto& member : group.members) member->algorithm = kAlgorithms[round * round % 5];
    check_all(group, 6, round * 37 % 700);
  }
}

// The sum of floats depends on its order: all members have the same, whichever way the bytes go.
TEST(sums_are_made_in_the_order_of_ranks) {
  const size_t count = 3001;
  const auto part = [](uint32_t rank, size_t i) { return 1.0f / static_cast<float>(rank * 977 + i + 1); };
  std::vector<float> expected(count);
  for (size_t i = 0; i < count; ++i) expected[i] = ((part(0, i) + part(1, i)) + part(2, i)) / 3;
  for (const auto way : kWays) {
    GroupOf group(3, 512, way);
    group.each([&](GroupMember& member) {
      std::vector<float> out(count);
      for (size_t i = 0; i < count; ++i) out[i] = part(member.rank, i);
      const GroupMember::Memory all{out.data(), count * sizeof(float)};
      demand(member.run(MR_ALL_REDUCE, {all}, {all}, 0, kF32, MR_AVG), member);
      CHECK(out == expected);
    });
  }
}

TEST(messages_by_tag) {
  for (const auto way : kWays) {
    GroupOf group(3, 64, way);
    group.each([](GroupMember& member) {
      if (member.rank == 0) {
        for (uint8_t tag = 0; tag < 3; ++tag) demand(member.send(1, tag, std::vector<uint8_t>(tag * 500, tag)), member);
        demand(member.send(2, 7, {1, 2, 3}), member);
      } else if (member.rank == 1) {
        for (uint8_t tag : {2, 0, 1}) {
          std::vector<uint8_t> data(tag * 500, 99);
          demand(member.receive(0, tag, data), member);
          CHECK(data == std::vector<uint8_t>(tag * 500, tag));
        }
        demand(member.send(2, 7, {4, 5, 6}), member);
      } else {
        std::vector<uint8_t> data(3);
        uint32_t senders = 0;
        for (int i = 0; i < 2; ++i) {
          demand(member.receive(-1, 7, data), member);
          senders |= 1u << member.sender;
          CHECK(data == (member.sender == 0 ? std::vector<uint8_t>{1, 2, 3} : std::vector<uint8_t>{4, 5, 6}));
        }
        CHECK_EQ(senders, 3u);
      }
    });
  }
}

TEST(a_message_of_another_size_is_told_and_gone) {
  GroupOf group(2, 64);
  group.each([](GroupMember& member) {
    if (member.rank == 0) {
      demand(member.send(1, 1, std::vector<uint8_t>(300, 1)), member);
      demand(member.send(1, 1, {5}), member);
      return;
    }
    std::vector<uint8_t> data(299);
    CHECK_EQ(member.receive(0, 1, data), int{MR_OUT_OF_BOUNDS});
    data.resize(1);
    demand(member.receive(0, 1, data), member);
    CHECK_EQ(data[0], 5);
  });
}

TEST(many_messages_both_ways_beside_collectives) {
  for (const auto way : kWays) {
    GroupOf group(2, 256, way);
    group.each([](GroupMember& member) {
      const uint32_t other = 1 - member.rank;
      std::thread sender([&] {
        for (int i = 0; i < 200; ++i)
          CHECK_EQ(member.send(other, 0, std::vector<uint8_t>(i * 5, uint8_t(i))), int{MR_OK});
      });
      std::thread receiver([&] {
        for (int i = 0; i < 200; ++i) {
          std::vector<uint8_t> data(i * 5);
          uint32_t from;
          mr_error error{};
          CHECK_EQ(mr_group_receive(member.group, other, 0, data.data(), data.size(), 30, &from, &error), int{MR_OK});
          CHECK(data == std::vector<uint8_t>(i * 5, uint8_t(i)));
        }
      });
      for (int i = 0; i < 200; ++i) {
        Ints one{i + static_cast<int>(member.rank)};
        demand(member.run(MR_ALL_REDUCE, {memory(one)}, {memory(one)}, 0, kI32, MR_SUM), member);
        CHECK_EQ(one[0], 2 * i + 1);
      }
      sender.join();
      receiver.join();
    });
  }
}

TEST(a_member_that_goes_is_named_by_all_others) {
  for (const auto& [way, algorithm] : kWaysAndAlgorithms) {
    GroupOf group(3, 256, way);
    group.each([&](GroupMember& member) {
      member.algorithm = algorithm;
      if (member.rank == 2) return member.engine.close();
      Ints one(5000);
      CHECK_EQ(member.run(MR_ALL_REDUCE, {memory(one)}, {memory(one)}, 0, kI32, MR_SUM), int{MR_PEER_LOST});
      CHECK_EQ(member.failed_rank(), 2);
      CHECK(std::string(member.error.message).find("rank 2 (rank2) is lost") != std::string::npos);
      // And so does everything that follows.
      CHECK_EQ(member.run(MR_BARRIER, {}, {}), int{MR_PEER_LOST});
      CHECK_EQ(member.send(1 - member.rank, 0, {1}), int{MR_PEER_LOST});
    });
  }
}

// What it gave stays; only what needs more of it fails.
TEST(a_member_may_leave) {
  for (const auto way : kWays) {
    GroupOf group(3, 256, way);
    group.each([&](GroupMember& member) {
      if (member.rank != 2) return;
      Ints given(50, 7);
      demand(member.run(MR_BROADCAST, {memory(given)}, {}, 2), member);
      demand(member.send(1, 4, {1, 2, 3}), member);
      mr_group_close(member.group);
    });
    group.each([&](GroupMember& member) {
      if (member.rank == 2) return;
      Ints taken(50);
      demand(member.run(MR_BROADCAST, {}, {memory(taken)}, 2), member);
      CHECK(taken == Ints(50, 7));
      std::vector<uint8_t> data(3);
      if (member.rank == 1) {
        demand(member.receive(-1, 4, data), member);
        CHECK_EQ(data[2], 3);
      }
      CHECK_EQ(member.receive(2, 4, data), int{MR_PEER_LOST});
      CHECK_EQ(member.send(2, 4, {1}), int{MR_PEER_LOST});
      CHECK(std::string(member.error.message).find("rank 2 (rank2) has left the group") != std::string::npos);
      CHECK_EQ(member.failed_rank(), -1);
      // Both are so far: the barrier of one ends all collectives of the other.
      const uint32_t other = 1 - member.rank;
      demand(member.send(other, 6, {1}), member);
      data.resize(1);
      demand(member.receive(other, 6, data), member);
      CHECK_EQ(member.run(MR_BARRIER, {}, {}), int{MR_PEER_LOST});
      CHECK_EQ(member.failed_rank(), 2);
      CHECK_EQ(mr_group_is_lost(member.group, 2), 1);
      // Messages between those who are left go on.
      if (member.rank == 0) demand(member.send(1, 5, {9}), member);
      if (member.rank == 1) demand(member.receive(0, 5, data), member);
    });
  }
}

TEST(a_deadline_ends_it_on_all) {
  for (const auto& [way, algorithm] : kWaysAndAlgorithms) {
    GroupOf group(3, 256, way);
    group.each([&](GroupMember& member) {
      member.algorithm = algorithm;
      if (member.rank == 1) return;
      // Both are so far: who of the two came late would be named by the other one.
      const uint32_t other = 2 - member.rank;
      std::vector<uint8_t> here(1);
      demand(member.send(other, 6, {1}), member);
      demand(member.receive(other, 6, here), member);
      CHECK_EQ(member.run(MR_BARRIER, {}, {}, 0, 0, 0, 0.5), int{MR_TRANSFER_TIMEOUT});
      CHECK_EQ(member.failed_rank(), 1);
    });
    // What the others have given before they gave up may still be enough for the one that came late, but no more.
    GroupMember& late = *group.members[1];
    if (late.run(MR_BARRIER, {}, {}) == MR_OK) late.run(MR_BARRIER, {}, {});
    CHECK_EQ(late.error.kind, int{MR_TRANSFER_TIMEOUT});
  }
}

// Between two others that wait for each other.
TEST(an_abort_ends_a_collective) {
  for (const auto& [way, algorithm] : kWaysAndAlgorithms) {
    GroupOf group(3, 256, way);
    group.each([&](GroupMember& member) {
      member.algorithm = algorithm;
      if (member.rank == 1) {
        CHECK_EQ(mr_group_abort(member.group, "enough", nullptr), int{MR_OK});
        return;
      }
      Ints one(5000);
      CHECK_EQ(member.run(MR_ALL_REDUCE, {memory(one)}, {memory(one)}, 0, kI32, MR_SUM), int{MR_CANCELLED});
      CHECK_EQ(member.failed_rank(), 1);
    });
  }
}

TEST(an_abort_reaches_all) {
  for (const auto way : kWays) {
    GroupOf group(2, 256, way);
    group.each([](GroupMember& member) {
      if (member.rank == 0) {
        CHECK_EQ(mr_group_abort(member.group, "enough", nullptr), int{MR_OK});
        return;
      }
      std::vector<uint8_t> data(1);
      CHECK_EQ(member.receive(0, 0, data), int{MR_CANCELLED});
      CHECK_EQ(member.failed_rank(), 0);
    });
  }
}

TEST(different_calls_are_told) {
  for (const auto way : kWays) {
    GroupOf group(2, 256, way);
    group.each([](GroupMember& member) {
      Ints few(member.rank == 0 ? 4 : 5);
      CHECK_EQ(member.run(MR_ALL_REDUCE, {memory(few)}, {memory(few)}, 0, kI32, MR_SUM), int{MR_CONFIG});
    });
    GroupOf another(3, 256, way);
    another.each([](GroupMember& member) {
      Ints few(4);
      member.algorithm = member.rank == 1 ? MR_RING : MR_DOUBLING;
      CHECK_EQ(member.run(MR_ALL_REDUCE, {memory(few)}, {memory(few)}, 0, kI32, MR_SUM), int{MR_CONFIG});
    });
    GroupOf mixed(3, 256, way);
    mixed.each([](GroupMember& member) {
      Ints few(4);
      member.algorithm = member.rank == 1 ? MR_RING : MR_DIRECT;
      CHECK_EQ(member.run(MR_ALL_REDUCE, {memory(few)}, {memory(few)}, 0, kI32, MR_SUM), int{MR_CONFIG});
    });
    GroupOf other(2, 256, way);
    other.each([](GroupMember& member) {
      Ints few(4);
      CHECK_EQ(member.rank == 0 ? member.run(MR_ALL_REDUCE, {memory(few)}, {memory(few)}, 0, kI32, MR_SUM)
                                : member.run(MR_BARRIER, {}, {}),
               int{MR_CONFIG});
    });
  }
}

// All calls are about as many bytes, but each member expects less of the other one than that gives.
TEST(parts_of_other_sizes_are_told) {
  for (const auto way : kWays)
    for (const uint32_t kind : {MR_ALL_GATHER, MR_REDUCE_SCATTER, MR_ALL_TO_ALL}) {
      GroupOf group(2, 256, way);
      std::atomic<int> told{0};  // by who notices first
      group.each([&](GroupMember& member) {
        using Memory = GroupMember::Memory;
        Ints given(8, 1), own(8), room(8, 2);
        const Memory large = memory(given), small{given.data(), 16}, into{room.data(), 16};
        const auto by_rank = [&](const Memory& ours, const Memory& theirs) {
          return member.rank == 0 ? std::vector{ours, theirs} : std::vector{theirs, ours};
        };
        if (kind == MR_ALL_GATHER) CHECK_EQ(member.run(kind, {large}, by_rank(memory(own), into)), int{MR_CONFIG});
        if (kind == MR_ALL_TO_ALL)
          CHECK_EQ(member.run(kind, by_rank(small, large), by_rank({own.data(), 16}, into)), int{MR_CONFIG});
        if (kind == MR_REDUCE_SCATTER)
          CHECK_EQ(member.run(kind, by_rank(small, large), {into}, 0, kI32, MR_SUM), int{MR_CONFIG});
        told += std::string(member.error.message).find("expects 16, in step 0") != std::string::npos;
        CHECK(std::all_of(room.begin() + 4, room.end(), [](int32_t each) { return each == 2; }));
      });
      CHECK(told.load() > 0);
    }
}

TEST(bad_arguments_change_nothing) {
  GroupOf group(2, 256);
  GroupMember& member = *group.members[0];
  Ints few(4), more(5);
  CHECK_EQ(member.run(MR_ALL_REDUCE, {memory(few)}, {memory(more)}, 0, kI32, MR_SUM), int{MR_CONFIG});
  CHECK_EQ(member.run(MR_ALL_REDUCE, {memory(few)}, {memory(few)}, 0, kI32, MR_AVG), int{MR_CONFIG});
  CHECK_EQ(member.run(MR_ALL_REDUCE, {memory(few)}, {memory(few)}, 0, 77, MR_SUM), int{MR_CONFIG});
  CHECK_EQ(member.run(MR_BROADCAST, {memory(few)}, {}, 2), int{MR_CONFIG});
  CHECK_EQ(member.run(99, {}, {}), int{MR_CONFIG});
  CHECK_EQ(member.run(MR_ALL_GATHER, {memory(few)}, {memory(few)}), int{MR_CONFIG});
  CHECK_EQ(member.send(0, 1, {1}), int{MR_CONFIG});
  CHECK_EQ(member.send(2, 1, {1}), int{MR_CONFIG});
  std::vector<uint8_t> data(1);
  CHECK_EQ(member.receive(1, 0, data, 0.01), int{MR_TRANSFER_TIMEOUT});
  CHECK_EQ(member.failed_rank(), -1);
  check_all(group, 2, 100);
}

TEST(closing_ends_what_waits) {
  GroupOf group(2, 256);
  std::atomic<int> kind{-1};
  std::thread waiter([&] { kind = group.members[0]->run(MR_BARRIER, {}, {}); });
  mr_group_close(group.members[0]->group);
  waiter.join();
  CHECK(kind == MR_CANCELLED || kind == MR_CONFIG);
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
