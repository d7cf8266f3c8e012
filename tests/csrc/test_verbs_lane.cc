// The verbs lane between two engines on the fake fabric: bytes, views, notifications, atomics, drops.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <future>

#include "check.h"
#include "pattern.h"
#include "transport/verbs_wire.h"
#include "verbs_side.h"
#include "view_copy.h"

using namespace mr;
using mr::test::FakeFabric;
using mr::test::paint;
using mr::test::VerbsPair;
using mr::test::VerbsSide;

namespace {

constexpr uint64_t kMiB = 1u << 20;

Bytes painted_bytes(uint64_t length, uint64_t seed) {
  Bytes out(length);
  mr::test::paint(out.data(), length, seed);
  return out;
}

}  // namespace

TEST(reads_and_writes_of_every_size) {
  VerbsPair pair;
  for (const uint64_t size :
       {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{64}, uint64_t{221}, uint64_t{4095}, uint64_t{4096},
        uint64_t{4097}, uint64_t{65536}, uint64_t{65537}, kMiB - 1, kMiB, kMiB + 1, 9 * kMiB + 5}) {
    Bytes owned = painted_bytes(size + 5, size), here(size + 2, 0xee);
    const auto region = pair.owner->share(owned.data(), owned.size());
    const auto remote = pair.owner->remote(region);
    for (int again = 0; again < 2; ++again) {
      std::fill(here.begin(), here.end(), 0xee);
      const OpRef read = pair.user->read(remote, 3, here.data() + 1, size);
      VerbsSide::expect_ok(read);
      if (read->lane != std::string("verbs")) mr::test::check_failed(__FILE__, __LINE__, read->lane);
      CHECK(std::equal(here.begin() + 1, here.end() - 1, owned.begin() + 3));
      CHECK_EQ(here.front(), 0xee);
      CHECK_EQ(here.back(), 0xee);
      const Bytes fresh = painted_bytes(size, size + 1 + static_cast<uint64_t>(again)), before = owned;
      const OpRef write = pair.user->write(remote, 2, fresh.data(), size);
      VerbsSide::expect_ok(write);
      CHECK_EQ(write->remote_state, MR_WRITTEN);
      CHECK(std::equal(fresh.begin(), fresh.end(), owned.begin() + 2));
      CHECK_EQ(owned[1], before[1]);
      CHECK_EQ(owned[size + 2], before[size + 2]);
    }
    VerbsSide::expect_ok(pair.owner->drop(region));
  }
  pair.finish();
}

TEST(the_card_is_given_the_addresses_of_the_memory_itself) {
  VerbsPair pair;
  Bytes owned = painted_bytes(3 * kMiB, 1), here(3 * kMiB);
  const auto region = pair.owner->share(owned.data(), owned.size());
  const auto remote = pair.owner->remote(region);
  for (const bool write : {false, true}) {
    pair.fabric.keep_log(true);
    const OpRef op = write ? pair.user->write(remote, 0, here.data(), here.size())
                           : pair.user->read(remote, 0, here.data(), here.size());
    VerbsSide::expect_ok(op);
    uint64_t bytes = 0;
    for (const auto& request : pair.fabric.requests()) {
      if (request.pieces.empty()) continue;  // the first request on a new queue pair
      const uint64_t offset = request.remote - reinterpret_cast<uintptr_t>(owned.data());
      CHECK(offset < owned.size());
      CHECK_EQ(request.pieces.size(), 1u);
      CHECK_EQ(request.pieces[0].addr, reinterpret_cast<uintptr_t>(here.data()) + offset);
      CHECK_EQ(request.opcode, write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ);
      // Boundaries between requests are those of cache lines in the owner's memory.
      CHECK(offset == 0 || request.remote % 64 == 0);
      bytes += request.pieces[0].length;
    }
    CHECK_EQ(bytes, here.size());
  }
  CHECK(here == owned);
  CHECK_EQ(pair.user->counter("verbs_staged_bytes"), 0u);
  pair.finish();
}

TEST(kept_memory_is_registered_once_and_small_operations_use_it_directly) {
  VerbsPair pair;
  Bytes owned = painted_bytes(1 << 16, 1), here(1 << 16);
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  pair.user->domain->keep(here.data(), here.size());
  VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), here.size()));
  const uint64_t registered = pair.fabric.calls("reg_mr");
  pair.fabric.keep_log(true);
  for (uint64_t i = 0; i < 200; ++i) {
    here[i * 8] ^= 0xff;
    VerbsSide::expect_ok(pair.user->read(remote, i * 8, here.data() + i * 8, 8));
  }
  CHECK(here == owned);
  CHECK_EQ(pair.fabric.calls("reg_mr"), registered);
  for (const auto& request : pair.fabric.requests()) {
    CHECK(request.pieces[0].addr >= reinterpret_cast<uintptr_t>(here.data()));
    CHECK(request.pieces[0].addr < reinterpret_cast<uintptr_t>(here.data()) + here.size());
  }
  pair.user->domain->forget(here.data(), here.size());
  VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), here.size()));
  CHECK(pair.fabric.calls("reg_mr") > registered);
  pair.finish();
}

TEST(views_on_both_ends) {
  VerbsPair pair;
  mr_view rows{};
  rows.offset = 40;
  rows.run = 24;
  rows.ndim = 2;
  rows.count[0] = 30;
  rows.stride[0] = 5000;
  rows.count[1] = 50;
  rows.stride[1] = 96;
  const View there = View::from(rows);
  for (const bool contiguous : {true, false}) {
    mr_view columns{};
    columns.offset = 3;
    columns.run = 8;
    columns.ndim = 1;
    columns.count[0] = there.bytes() / 8;
    columns.stride[0] = contiguous ? 8 : 11;
    const View here = View::from(columns);
    Bytes owned = painted_bytes(there.end() + 9, 1), local(here.end() + 9, 0xee), expected = local;
    const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
    mr::test::copy_views(expected.data(), here, owned.data(), there, 0, there.bytes());
    const OpRef read = pair.user->begin(Verb::read, remote, there, local.data(), here);
    VerbsSide::expect_ok(read);
    CHECK(local == expected);
    Bytes source = painted_bytes(local.size(), 2), after_write = owned;
    mr::test::copy_views(after_write.data(), there, source.data(), here, 0, there.bytes());
    VerbsSide::expect_ok(pair.user->begin(Verb::write, remote, there, source.data(), here));
    CHECK(owned == after_write);
  }
  pair.finish();
}

TEST(short_remote_runs_are_packed_by_the_owner_where_tcp_is_there) {
  for (const bool tcp : {true, false})
    for (const uint64_t run : {uint64_t{8}, uint64_t{511}, uint64_t{512}}) {
      VerbsPair pair(nullptr, tcp ? "verbs,tcp" : "verbs");
      mr_view raw{};
      raw.run = run;
      raw.ndim = 1;
      raw.count[0] = 50;
      raw.stride[0] = static_cast<int64_t>(run) + 9;
      const View there = View::from(raw);
      Bytes owned = painted_bytes(there.end(), 1), here(there.bytes()), expected(there.bytes());
      mr::test::copy_views(expected.data(), View::contiguous(0, there.bytes()), owned.data(), there, 0, there.bytes());
      const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
      for (const uint32_t flags : {0u, uint32_t{MR_STRICT}}) {
        const OpRef op =
            pair.user->begin(Verb::read, remote, there, here.data(), View::contiguous(0, there.bytes()), 30, flags);
        VerbsSide::expect_ok(op);
        CHECK(here == expected);
        const bool packed = tcp && run < 512 && flags == 0;
        CHECK_EQ(std::string(op->lane), packed ? "tcp" : "verbs");
        CHECK_EQ(op->skipped.find("verbs_min_run") != std::string::npos, packed);
        std::fill(here.begin(), here.end(), 0);
      }
      pair.finish();
    }
}

TEST(local_runs_go_into_one_request_as_far_as_the_card_takes_them) {
  VerbsPair pair(nullptr, "verbs", false, [](FakeFabric& fabric) { fabric.card("use0").attributes.max_sge = 4; });
  mr_view raw{};
  raw.run = 16;
  raw.ndim = 1;
  raw.count[0] = 40;
  raw.stride[0] = 32;
  Bytes owned = painted_bytes(640, 1), local(40 * 32);
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  VerbsSide::expect_ok(pair.user->read(remote, 0, local.data(), 1));
  pair.fabric.keep_log(true);
  CHECK_EQ(
      VerbsSide::wait(pair.user->begin(Verb::read, remote, View::contiguous(0, 640), local.data(), View::from(raw))),
      MR_OK);
  CHECK_EQ(pair.fabric.requests().size(), 10u);
  CHECK_EQ(pair.fabric.requests()[0].pieces.size(), 4u);
  pair.finish();
}

TEST(regions_and_memory_longer_than_a_registration_are_split_at_the_seams) {
  VerbsPair pair(nullptr, "verbs", false, [](FakeFabric& fabric) {
    fabric.card("own0").attributes.max_mr_size = (2u << 20) + 100;  // pages of it
    fabric.card("use0").attributes.max_mr_size = 3u << 20;
  });
  Bytes owned = painted_bytes(9 * kMiB + 77, 1), here(9 * kMiB + 77);
  const auto region = pair.owner->share(owned.data(), owned.size());
  const auto remote = pair.owner->remote(region);
  VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), here.size()));
  CHECK(here == owned);
  VerbsSide::expect_ok(pair.user->read(remote, 2 * kMiB - 3, here.data(), 6));
  CHECK(std::equal(here.begin(), here.begin() + 6, owned.begin() + 2 * kMiB - 3));
  const Bytes fresh = painted_bytes(owned.size(), 5);
  VerbsSide::expect_ok(pair.user->write(remote, 0, fresh.data(), fresh.size()));
  CHECK(owned == fresh);
  VerbsSide::expect_ok(pair.owner->drop(region));
  pair.finish();
}

TEST(a_notification_comes_after_the_bytes) {
  VerbsPair pair;
  for (const uint64_t size : {8, 3000, 50000, 100000}) {
    Bytes owned(size), source(size);
    const auto region = pair.owner->share(owned.data(), owned.size());
    const auto remote = pair.owner->remote(region);
    for (uint64_t i = 0; i < 20; ++i) {
      paint(source.data(), source.size(), i);
      const OpRef op = pair.user->write_and_notify(remote, 0, source, 1000 + i);
      uint64_t value = 0;
      CHECK_EQ(region->next_notification(20, &value), 1);
      CHECK_EQ(value, 1000 + i);
      CHECK(mr::test::painted(owned.data(), owned.size(), i));
      VerbsSide::expect_ok(op);
      CHECK_EQ(std::string(op->lane), "verbs");
    }
    VerbsSide::expect_ok(pair.owner->drop(region));
  }
  pair.finish();
}

TEST(atomics_are_the_owners_unless_the_cards_are_asked_for) {
  for (const bool by_card : {false, true}) {
    VerbsPair pair([&](mr_options& raw) { raw.verbs_atomics = by_card; });
    alignas(8) uint64_t words[4] = {5, 6, 7, 8};
    const auto remote = pair.owner->remote(pair.owner->share(words, sizeof words));
    uint64_t seen = 0;
    VerbsSide::expect_ok(pair.user->read(remote, 0, &seen, 8));
    pair.fabric.keep_log(true);
    const View word = View::contiguous(8, 8);
    const OpRef add = pair.user->begin(Verb::fetch_add, remote, word, nullptr, word, 30, 0, 10);
    VerbsSide::expect_ok(add);
    CHECK_EQ(add->value, 6u);
    const OpRef swap = pair.user->begin(Verb::compare_and_swap, remote, word, nullptr, word, 30, 0, 16, 99);
    VerbsSide::expect_ok(swap);
    CHECK_EQ(swap->value, 16u);
    const OpRef refused = pair.user->begin(Verb::compare_and_swap, remote, word, nullptr, word, 30, 0, 16, 1);
    VerbsSide::expect_ok(refused);
    CHECK_EQ(refused->value, 99u);
    CHECK_EQ(words[1], 99u);
    CHECK_EQ(words[0], 5u);
    CHECK_EQ(pair.fabric.requests().size(), by_card ? 3u : 0u);
    CHECK_EQ(std::string(add->lane), by_card ? "verbs" : "control");
    pair.finish();
  }
}

TEST(a_drop_takes_the_keys_away_and_later_operations_are_refused) {
  VerbsPair pair;
  Bytes owned = painted_bytes(1 << 20, 1), here(1 << 20);
  const auto region = pair.owner->share(owned.data(), owned.size());
  const auto remote = pair.owner->remote(region);
  VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), here.size()));
  VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), 8));
  const int before = pair.fabric.open("mr");
  VerbsSide::expect_ok(pair.owner->drop(region));
  CHECK(pair.fabric.open("mr") < before);
  for (const uint64_t size : {uint64_t{0}, uint64_t{8}, uint64_t{100000}, uint64_t{1} << 20}) {
    CHECK_EQ(VerbsSide::wait(pair.user->read(remote, 0, here.data(), size)), MR_ACCESS_DENIED);
    CHECK_EQ(VerbsSide::wait(pair.user->write(remote, 0, here.data(), size)), MR_ACCESS_DENIED);
  }
  CHECK(mr::test::painted(owned.data(), owned.size(), 1));
  // The others are not disturbed.
  const auto other = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  VerbsSide::expect_ok(pair.user->read(other, 0, here.data(), here.size()));
  CHECK(here == owned);
  pair.finish();
}

TEST(rights_keys_and_bounds_are_enforced) {
  VerbsPair pair;
  Bytes owned = painted_bytes(4096, 1), here(8192);
  const auto readable = pair.owner->remote(pair.owner->share(owned.data(), owned.size(), MR_READ));
  VerbsSide::expect_ok(pair.user->read(readable, 0, here.data(), 4096));
  CHECK_EQ(VerbsSide::wait(pair.user->write(readable, 0, here.data() + 4096, 4096)), MR_ACCESS_DENIED);
  CHECK_EQ(VerbsSide::wait(pair.user->write(readable, 0, here.data() + 4096, 8)), MR_ACCESS_DENIED);
  CHECK_EQ(VerbsSide::wait(pair.user->read(readable, 4000, here.data(), 97)), MR_OUT_OF_BOUNDS);
  CHECK_EQ(VerbsSide::wait(pair.user->read(readable, UINT64_MAX - 8, here.data(), 4)), MR_OUT_OF_BOUNDS);
  auto forged = std::make_shared<RemoteRegion>(*readable);
  forged->name.key.word[1] ^= 1;
  CHECK_EQ(VerbsSide::wait(pair.user->read(forged, 0, here.data(), 8)), MR_ACCESS_DENIED);
  CHECK_EQ(VerbsSide::wait(pair.user->read(forged, 0, here.data(), 4096)), MR_ACCESS_DENIED);
  CHECK(mr::test::painted(owned.data(), owned.size(), 1));
  VerbsSide::expect_ok(pair.user->read(readable, 0, here.data(), 4096));
  CHECK(std::equal(owned.begin(), owned.end(), here.begin()));
  pair.finish();
}

TEST(large_operations_use_all_rails_and_both_ways_go_at_once) {
  VerbsPair pair(nullptr, "verbs", true);
  Bytes owned = painted_bytes(32 * kMiB, 1), here(32 * kMiB), back(32 * kMiB), fresh = painted_bytes(32 * kMiB, 2);
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  const auto other = pair.user->remote(pair.user->share(fresh.data(), fresh.size()));
  for (uint32_t rails = 0; rails < 2;) {
    const OpRef connects = pair.user->read(remote, 0, here.data(), here.size());
    VerbsSide::expect_ok(connects);
    rails = connects->rails;
  }
  pair.fabric.keep_log(true);
  const OpRef read = pair.user->read(remote, 0, here.data(), here.size());
  const OpRef reverse = pair.owner->read(other, 0, back.data(), back.size());
  VerbsSide::expect_ok(read);
  VerbsSide::expect_ok(reverse);
  CHECK(here == owned);
  CHECK(back == fresh);
  CHECK_EQ(read->rails, 2u);
  std::map<std::string, uint64_t> bytes;
  for (const auto& request : pair.fabric.requests())
    for (const auto& piece : request.pieces) bytes[request.card] += piece.length;
  for (const char* card : {"use0", "use1"}) CHECK(bytes[card] >= kMiB);  // whoever is done sooner gets more
  CHECK_EQ(bytes["use0"] + bytes["use1"], 32 * kMiB);
  pair.finish();
}

TEST(a_rail_that_takes_long_to_register_memory_gets_its_share_while_the_other_is_busy) {
  for (const bool in_time : {true, false}) {
    VerbsPair pair(nullptr, "verbs", true);
    Bytes owned = painted_bytes(4 * kMiB, 1), here(4 * kMiB), fresh(4 * kMiB);
    const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
    pair.user->domain->keep(here.data(), here.size());
    for (uint32_t rails = 0; rails < 2 || pair.user->counter("verbs_pairs_opened") < 4;) {
      const OpRef connects = pair.user->read(remote, 0, here.data(), here.size());
      VerbsSide::expect_ok(connects);
      rails = connects->rails;
    }
    std::atomic<bool> busy{in_time};
    std::atomic<uint64_t> taken{0};  // by the one that is late
    std::atomic<size_t> begun{0};
    pair.fabric.decide([&](const auto& request) {
      for (const auto& piece : request.pieces) taken += request.card == "use1" ? piece.length : 0;
      begun += !request.pieces.empty();
      return request.card == "use0" && !request.pieces.empty() && busy ? FakeFabric::Fate{FakeFabric::Fate::hold}
                                                                       : FakeFabric::Fate{};
    });
    pair.fabric.gates().hold("reg_mr use1");
    const OpRef op = pair.user->read(remote, 0, fresh.data(), fresh.size());
    while (begun == 0) std::this_thread::yield();
    if (in_time) pair.fabric.gates().let_go();
    for (const Time limit = after(20); in_time && taken < kMiB + kMiB / 2 && Clock::now() < limit;)
      std::this_thread::yield();
    busy = false;
    pair.fabric.kick();
    VerbsSide::expect_ok(op);
    CHECK(fresh == owned);
    CHECK(in_time ? taken >= kMiB + kMiB / 2 : taken == 0);
    pair.finish();
  }
}

TEST(many_small_operations_at_once) {
  VerbsPair pair([](mr_options& raw) { raw.verbs_depth = 32; });
  constexpr uint64_t kCount = 4000;
  Bytes owned = painted_bytes(kCount * 16, 1), here(kCount * 16);
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  pair.user->domain->keep(here.data(), here.size());
  std::vector<OpRef> ops;
  for (uint64_t i = 0; i < kCount; ++i) ops.push_back(pair.user->read(remote, i * 16, here.data() + i * 16, 16));
  for (const OpRef& op : ops) VerbsSide::expect_ok(op);
  CHECK(here == owned);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      for (uint64_t i = t; i < kCount; i += 3) {
        here[i * 16] ^= 0x55;
        VerbsSide::wait(pair.user->read(remote, i * 16, here.data() + i * 16, 16));
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(here == owned);
  pair.finish();
}

TEST(many_small_operations_that_wait_cost_little_and_register_next_to_nothing) {
  VerbsPair pair;
  constexpr uint64_t kCount = 30000;
  Bytes owned = painted_bytes(kCount * 8, 1), here(kCount * 8);
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  const uint64_t registered = pair.fabric.calls("reg_mr");
  std::atomic<bool> hold{true};
  pair.fabric.decide([&](const auto&) { return hold ? FakeFabric::Fate{FakeFabric::Fate::hold} : FakeFabric::Fate{}; });
  const std::clock_t before = std::clock();  // of all threads
  std::vector<OpRef> ops;
  for (uint64_t i = 0; i < kCount; ++i) ops.push_back(pair.user->read(remote, i * 8, here.data() + i * 8, 8, 120));
  hold = false;
  pair.fabric.kick();
  for (const OpRef& op : ops) VerbsSide::expect_ok(op);
  CHECK((std::clock() - before) / CLOCKS_PER_SEC < 10);  // looking at all that wait each time: a minute
  CHECK(here == owned);
  // The owner's. One of ours is right where room comes up just after a small operation found none.
  CHECK(pair.fabric.calls("reg_mr") <= registered + 1 + kCount / 1000);
  pair.finish();
}

TEST(thousands_of_operations_register_no_more_ranges_at_a_time_than_a_card_may_know) {
  VerbsPair pair;
  constexpr uint64_t kCount = 6000, kBytes = 8192;
  Bytes owned = painted_bytes(kCount * kBytes, 1), here(kCount * kBytes);
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), 8));
  pair.fabric.gates().hold("reg_mr use0");
  std::vector<OpRef> ops;
  for (uint64_t i = 0; i < kCount; ++i)
    ops.push_back(pair.user->read(remote, i * kBytes, here.data() + i * kBytes, kBytes, 120));
  pair.fabric.gates().let_go();
  for (const OpRef& op : ops) VerbsSide::expect_ok(op);
  CHECK(here == owned);
  pair.finish();
}

TEST(memory_that_can_not_be_registered_is_told_or_goes_by_tcp) {
  for (const bool strict : {true, false}) {
    VerbsPair pair(nullptr, "verbs,tcp");
    Bytes owned = painted_bytes(kMiB, 1), here(kMiB);
    const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
    VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), 8));
    std::promise<void> settled;  // the small one's registration, which it did without
    pair.user->domain->rails()[0].card()->memory_worker.delist([&] { settled.set_value(); });
    settled.get_future().wait();
    pair.fabric.fail_call("reg_mr", ENOMEM, 0, 2);  // of what is local: the region's keys are known
    const OpRef op = pair.user->read(remote, 0, here.data(), here.size(), 30, strict ? MR_STRICT : 0);
    CHECK_EQ(VerbsSide::wait(op), strict ? MR_REGISTRATION : MR_OK);
    if (strict) {
      CHECK(op->status().text.find("ibv_reg_mr of 1048576 bytes") != std::string::npos);
    } else {
      CHECK_EQ(std::string(op->lane), "tcp");
      CHECK(op->skipped.find("ibv_reg_mr") != std::string::npos);
      CHECK(here == owned);
    }
    VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), here.size(), 30, MR_STRICT));
    pair.finish();
  }
}

TEST(a_region_that_can_not_be_registered_goes_by_tcp) {
  VerbsPair pair(nullptr, "verbs,tcp");
  Bytes owned = painted_bytes(kMiB, 1), here(kMiB);
  pair.user->domain->keep(here.data(), here.size());
  const auto first = pair.owner->remote(pair.owner->share(owned.data(), 8));
  VerbsSide::expect_ok(pair.user->read(first, 0, here.data(), 8));
  pair.fabric.fail_call("reg_mr", ENOMEM, 1, 2);  // after the local one
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  const OpRef op = pair.user->read(remote, 0, here.data(), here.size());
  VerbsSide::expect_ok(op);
  CHECK(here == owned);
  pair.finish();
}

TEST(on_demand_paging_is_used_where_asked_and_there) {
  VerbsPair pair([](mr_options& raw) { raw.verbs_on_demand = 1; }, "verbs", false,
                 [](FakeFabric& fabric) { fabric.card("use0").on_demand_paging = true; });
  Bytes owned = painted_bytes(kMiB, 1), here(kMiB);
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), here.size()));
  CHECK(here == owned);
  pair.finish();
}

TEST(the_budget_of_queue_pairs_sends_the_rest_by_tcp) {
  VerbsPair pair([](mr_options& raw) { raw.verbs_max_queue_pairs = 1; }, "verbs,tcp");
  Bytes owned = painted_bytes(kMiB, 1), here(kMiB);
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  const auto other = pair.user->remote(pair.user->share(here.data(), here.size()));
  for (int i = 0; i < 20; ++i) {  // a second queue pair is refused, and the first is none the worse for it
    const OpRef op = pair.user->read(remote, 0, here.data(), here.size());
    VerbsSide::expect_ok(op);
    CHECK_EQ(std::string(op->lane), "verbs");
  }
  CHECK_EQ(pair.user->counter("verbs_pairs_lost"), 0u);
  const OpRef op = pair.owner->read(other, 0, owned.data(), owned.size());
  VerbsSide::expect_ok(op);
  CHECK_EQ(std::string(op->lane), "tcp");
  CHECK(op->skipped.find("verbs_max_queue_pairs") != std::string::npos);
  pair.finish();
}

TEST(frames_that_are_cut_short_or_lie_are_refused) {
  VerbsOffer offer;
  offer.number = 7;
  offer.end = {0x123456, 0xabcdef};
  VerbsAccept accept;
  accept.status = fail(MR_RESOURCE_EXHAUSTED, "no more");
  VerbsKeys keys;
  keys.size = 3 << 20;
  keys.piece_bytes = 1 << 20;
  keys.rkeys = {1, 2, 3};
  RailFace face;
  face.gids.resize(2);
  const std::pair<Bytes, std::function<void(Reader&)>> frames[] = {
      {offer.encode(), [](Reader& in) { VerbsOffer::decode(in); }},
      {accept.encode(), [](Reader& in) { VerbsAccept::decode(in); }},
      {VerbsWant{1, {2, Key::random()}, MR_READ, 0}.encode(), [](Reader& in) { VerbsWant::decode(in); }},
      {keys.encode(), [](Reader& in) { VerbsKeys::decode(in); }},
      {encode_rails({face, face}), [](Reader& in) { decode_rails(in); }},
  };
  for (const auto& [bytes, decode] : frames) {
    Reader whole(bytes);
    decode(whole);
    for (size_t cut = 0; cut < bytes.size(); ++cut) CHECK_THROWS(Error, Reader in({bytes.data(), cut}); decode(in));
    Bytes longer = bytes;
    longer.push_back(0);
    CHECK_THROWS(Error, Reader in(longer); decode(in));
  }
  const auto refuses = [](VerbsKeys wrong) {
    CHECK_THROWS(Error, const Bytes bytes = wrong.encode(); Reader in(bytes); VerbsKeys::decode(in));
  };
  VerbsKeys wrong = keys;
  wrong.rkeys.pop_back();  // a range without a key
  refuses(wrong);
  wrong = keys;
  wrong.piece_bytes = 0;
  refuses(wrong);
  wrong = keys;
  wrong.base = UINT64_MAX - 5;
  refuses(wrong);
  offer.end.psn = 1 << 24;
  CHECK_THROWS(Error, const Bytes bytes = offer.encode(); Reader in(bytes); VerbsOffer::decode(in));
}

TEST(a_forked_child_takes_nothing_away_from_its_parent) {
  static std::atomic<bool> in_child;
  in_child = false;
  Verbs table = FakeFabric::verbs();
  const auto demand_parent = [] {
    if (in_child) ::_exit(1);
  };
  static const auto* const demand = &demand_parent;
  table.destroy_qp = [](ibv_qp* pair) { return (*demand)(), FakeFabric::verbs().destroy_qp(pair); };
  table.destroy_cq = [](ibv_cq* queue) { return (*demand)(), FakeFabric::verbs().destroy_cq(queue); };
  table.dereg_mr = [](ibv_mr* region) { return (*demand)(), FakeFabric::verbs().dereg_mr(region); };
  table.dealloc_pd = [](ibv_pd* domain) { return (*demand)(), FakeFabric::verbs().dealloc_pd(domain); };
  table.close_device = [](ibv_context* device) { return (*demand)(), FakeFabric::verbs().close_device(device); };
  VerbsPair pair(nullptr, "verbs", false, nullptr, false, table);
  Bytes owned = painted_bytes(kMiB, 1), here(kMiB);
  const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
  pair.user->domain->keep(here.data(), here.size());
  VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), here.size()));
  {
    MemoryRegion region(pair.user->domain->rails()[0].card()->domain, here.data(), 8, 0);
    const pid_t child = ::fork();
    if (child == 0) {
      in_child = true;
      ::alarm(20);
      region.destroy();
      pair.user->domain->close();
      ::_exit(0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
  }
  VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), here.size()));
  pair.finish();
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
