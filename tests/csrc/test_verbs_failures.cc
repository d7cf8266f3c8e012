// What goes wrong on the verbs lane, on the fake fabric: each operation ends once, right or with one typed error, and
// nothing is written by what was given up.
#include <algorithm>

#include "check.h"
#include "pattern.h"
#include "verbs_side.h"

using namespace mr;
using mr::test::FakeFabric;
using mr::test::VerbsPair;
using mr::test::VerbsSide;

namespace {

constexpr uint64_t kMiB = 1u << 20;
using Fate = FakeFabric::Fate;

Bytes painted_bytes(uint64_t length, uint64_t seed) {
  Bytes out(length);
  mr::test::paint(out.data(), length, seed);
  return out;
}

// A pair with a region of each side's own, connected.
struct Connected : VerbsPair {
  explicit Connected(const VerbsSide::Change& change = nullptr, const std::string& lanes = "verbs", bool rails = false,
                     uint64_t size = 4 * kMiB)
      : VerbsPair(change, lanes, rails), owned(painted_bytes(size, 1)), here(size) {
    region = owner->share(owned.data(), owned.size());
    remote = owner->remote(region);
    user->domain->keep(here.data(), here.size());
    VerbsSide::expect_ok(user->read(remote, 0, here.data(), here.size()));
    std::fill(here.begin(), here.end(), 0);
  }
  ~Connected() { end(); }  // before the memory goes

  // Old ends are destroyed by threads that nobody waits for.
  bool comes_down_to(int most) {
    for (const Time limit = after(20); fabric.open("qp") > most && Clock::now() < limit;) std::this_thread::yield();
    return fabric.open("qp") <= most;
  }

  Bytes owned, here;
  RegionRef region;
  std::shared_ptr<RemoteRegion> remote;
};

const ibv_wc_status kStatuses[] = {IBV_WC_LOC_LEN_ERR,  IBV_WC_LOC_QP_OP_ERR,   IBV_WC_MW_BIND_ERR,
                                   IBV_WC_BAD_RESP_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR,
                                   IBV_WC_REM_OP_ERR,   IBV_WC_RETRY_EXC_ERR,   IBV_WC_REM_ABORT_ERR,
                                   IBV_WC_FATAL_ERR,    IBV_WC_GENERAL_ERR,     IBV_WC_RNR_RETRY_EXC_ERR,
                                   IBV_WC_WR_FLUSH_ERR, IBV_WC_INV_EECN_ERR,    IBV_WC_RESP_TIMEOUT_ERR};

}  // namespace

TEST(a_request_that_fails_once_is_posted_again_whatever_the_status) {
  Connected pair;
  for (const ibv_wc_status status : kStatuses)
    for (const auto kind : {Fate::fail_before, Fate::fail_after})
      for (const bool write : {false, true})
        for (const uint64_t size : {uint64_t{8}, uint64_t{3000}, 4 * kMiB}) {
          std::atomic<int> countdown{size > kMiB ? 2 : 1};
          pair.fabric.decide([&](const FakeFabric::Request& request) {
            return !request.pieces.empty() && --countdown == 0 ? Fate{kind, status, 0x21} : Fate{};
          });
          Bytes fresh = painted_bytes(size, static_cast<uint64_t>(status) + size);
          pair.user->domain->keep(fresh.data(), fresh.size());
          const OpRef op = write ? pair.user->write(pair.remote, 0, fresh.data(), size)
                                 : pair.user->read(pair.remote, 0, pair.here.data(), size);
          const int end = VerbsSide::wait(op);
          if (end != MR_OK) mr::test::check_failed(__FILE__, __LINE__, op->status().text);
          CHECK(op->retries > 0);
          if (write)
            CHECK(std::equal(fresh.begin(), fresh.end(), pair.owned.begin()));
          else
            CHECK(std::equal(pair.here.begin(), pair.here.begin() + static_cast<ptrdiff_t>(size), pair.owned.begin()));
          pair.fabric.decide(nullptr);
          pair.user->domain->forget(fresh.data(), fresh.size());
        }
  CHECK(pair.user->counter("verbs_pairs_lost") > 0);
  pair.finish();
}

TEST(a_broken_pair_is_replaced_by_one_of_another_number_and_the_old_ends_are_destroyed) {
  Connected pair;
  pair.fabric.keep_log(true);
  for (int i = 0; i < 10; ++i) {
    std::atomic<bool> failed{false};
    pair.fabric.decide([&](const auto& request) {
      return !request.pieces.empty() && !failed.exchange(true) ? Fate{Fate::fail_before} : Fate{};
    });
    VerbsSide::expect_ok(pair.user->read(pair.remote, 0, pair.here.data(), 8));
  }
  std::set<uint32_t> numbers;
  for (const auto& request : pair.fabric.requests()) numbers.insert(request.queue_pair);
  CHECK(numbers.size() >= 10);
  CHECK(pair.comes_down_to(4));  // two queue pairs, each with two ends
  pair.finish();
}

TEST(nothing_is_posted_while_the_fate_of_a_write_is_not_known) {
  // The owner's end is not destroyed: the fence waits, and so does every later operation.
  Connected pair(nullptr, "verbs,tcp", true);
  pair.fabric.gates().hold("destroy_qp");
  std::atomic<bool> failed{false};
  pair.fabric.keep_log(true);
  pair.fabric.decide([&](const auto& request) {
    const bool writes = request.opcode == IBV_WR_RDMA_WRITE && !request.pieces.empty();
    return writes && !failed.exchange(true) ? Fate{Fate::fail_after} : Fate{};
  });
  uint64_t word = 1;
  const OpRef first = pair.user->write(pair.remote, 0, &word, sizeof word);
  for (const Time limit = after(20); pair.user->counter("verbs_pairs_lost") == 0 && Clock::now() < limit;)
    std::this_thread::yield();
  const auto num_posted = [&] {  // but for those that only try a new queue pair
    const auto log = pair.fabric.requests();
    return std::count_if(log.begin(), log.end(), [](const auto& request) { return !request.pieces.empty(); });
  };
  const auto posted = num_posted();
  const OpRef second = pair.user->read(pair.remote, 8, pair.here.data(), 8);
  CHECK(!second->wait(0.1));
  CHECK(!first->done());
  CHECK_EQ(num_posted(), posted);
  pair.fabric.gates().let_go();
  VerbsSide::expect_ok(first);
  VerbsSide::expect_ok(second);
  CHECK_EQ(pair.owned[0], 1);
  pair.finish();
}

TEST(a_request_refused_by_the_owners_card_ends_with_access_denied_and_disturbs_nobody) {
  Connected pair;
  pair.fabric.decide([](const auto& request) {
    return request.opcode == IBV_WR_RDMA_WRITE && !request.pieces.empty()
               ? Fate{Fate::fail_before, IBV_WC_REM_ACCESS_ERR}
               : Fate{};
  });
  std::vector<OpRef> reads;
  for (int i = 0; i < 20; ++i) reads.push_back(pair.user->read(pair.remote, 0, pair.here.data(), 4 * kMiB));
  const OpRef write = pair.user->write(pair.remote, 0, pair.here.data(), 100000);
  CHECK_EQ(VerbsSide::wait(write), MR_ACCESS_DENIED);
  CHECK(write->status().text.find("remote access error") != std::string::npos);
  for (const OpRef& read : reads) VerbsSide::expect_ok(read);
  CHECK(mr::test::painted(pair.owned.data(), pair.owned.size(), 1));
  pair.finish();
}

TEST(local_memory_that_the_card_does_not_know_is_told) {
  Connected pair;
  std::atomic<bool> failed{false};
  pair.fabric.decide([&](const auto& request) {
    return !request.pieces.empty() && !failed.exchange(true) ? Fate{Fate::fail_before, IBV_WC_LOC_PROT_ERR} : Fate{};
  });
  const OpRef op = pair.user->read(pair.remote, 0, pair.here.data(), kMiB);
  CHECK_EQ(VerbsSide::wait(op), MR_REGISTRATION);
  pair.fabric.decide(nullptr);
  VerbsSide::expect_ok(pair.user->read(pair.remote, 0, pair.here.data(), kMiB));
  pair.finish();
}

TEST(what_always_fails_ends_or_goes_by_tcp) {
  for (const bool tcp : {false, true}) {
    Connected pair(nullptr, tcp ? "verbs,tcp" : "verbs");
    pair.fabric.decide([](const auto& request) {
      return request.pieces.empty() ? Fate{} : Fate{Fate::fail_before, IBV_WC_REM_OP_ERR, 7};
    });
    for (const uint64_t size : {uint64_t{8}, 4 * kMiB}) {
      const OpRef op = pair.user->read(pair.remote, 0, pair.here.data(), size);
      CHECK_EQ(VerbsSide::wait(op), tcp ? MR_OK : MR_PEER_LOST);
      const std::string& told = tcp ? op->skipped : op->status().text;
      if (told.find("remote operation error") == std::string::npos) mr::test::check_failed(__FILE__, __LINE__, told);
      if (tcp) CHECK_EQ(std::string(op->lane), "tcp");
    }
    pair.finish();
  }
}

TEST(a_dead_rail_moves_traffic_to_the_other_and_then_to_tcp_and_back) {
  Connected pair(nullptr, "verbs,tcp", true);
  const auto moved = [&](const char* card) {
    pair.fabric.keep_log(true);
    std::fill(pair.here.begin(), pair.here.end(), 0);
    const OpRef op = pair.user->read(pair.remote, 0, pair.here.data(), pair.here.size());
    VerbsSide::expect_ok(op);
    CHECK(pair.here == pair.owned);
    const auto log = pair.fabric.requests();
    return std::count_if(log.begin(), log.end(),
                         [&](const auto& request) { return request.card == card && !request.pieces.empty(); });
  };
  for (const char* card : {"use0", "use1"}) {
    bool used = false;
    for (const Time limit = after(20); !used && Clock::now() < limit;) used = moved(card) > 0;
    CHECK(used);
  }
  pair.fabric.set_port("own0", false);
  for (int i = 0; i < 3; ++i) VerbsSide::expect_ok(pair.user->read(pair.remote, 0, pair.here.data(), 8));
  CHECK(moved("use1") > 0);
  pair.fabric.set_port("own1", false);
  const OpRef small = pair.user->read(pair.remote, 0, pair.here.data(), 8);
  VerbsSide::expect_ok(small);
  const OpRef by_tcp = pair.user->read(pair.remote, 0, pair.here.data(), 4096);
  VerbsSide::expect_ok(by_tcp);
  CHECK_EQ(std::string(by_tcp->lane), "tcp");
  pair.fabric.set_port("own0", true);
  pair.fabric.set_port("own1", true);
  std::string lane = "tcp";
  for (const Time limit = after(20); lane != "verbs" && Clock::now() < limit;) {
    const OpRef op = pair.user->read(pair.remote, 0, pair.here.data(), 4096);
    VerbsSide::expect_ok(op);
    lane = op->lane;
  }
  CHECK_EQ(lane, "verbs");
  pair.finish();
}

TEST(a_card_that_dies_is_let_go_of_and_used_again_when_it_is_back) {
  for (const std::string side : {"use", "own"})
    for (const bool silent : {false, true}) {
      Connected pair(nullptr, "verbs,tcp", true);
      const auto read = [&](uint64_t size) {
        std::fill(pair.here.begin(), pair.here.end(), 0);
        const OpRef op = pair.user->read(pair.remote, 0, pair.here.data(), size);
        VerbsSide::expect_ok(op);
        CHECK(std::equal(pair.here.begin(), pair.here.begin() + static_cast<ptrdiff_t>(size), pair.owned.begin()));
        return op;
      };
      const auto until = [](const char* what, const auto& reached) {
        for (const Time limit = after(20); !reached();)
          if (Clock::now() > limit) mr::test::check_failed(__FILE__, __LINE__, std::string("not reached: ") + what);
      };
      const auto uses_both_rails = [&] { return read(pair.here.size())->rails == 2; };
      until("both rails", uses_both_rails);
      for (const char* number : {"0", "1"}) {
        std::vector<OpRef> ops;
        for (int i = 0; i < 8; ++i) ops.push_back(pair.user->read(pair.remote, 0, pair.here.data(), pair.here.size()));
        pair.fabric.kill(side + number, silent);
        for (const OpRef& op : ops) VerbsSide::expect_ok(op);
        CHECK(pair.here == pair.owned);
      }
      until("tcp", [&] { return read(4096)->lane == std::string("tcp"); });
      // Nothing of the old cards is held: their devices may wait for that.
      until("all let go of", [&] { return pair.fabric.open("context") == 2; });
      CHECK(read(pair.here.size())->lane == std::string("tcp"));
      for (const char* number : {"0", "1"}) pair.fabric.revive(side + number);
      until("both rails again", uses_both_rails);
      until("small ones again", [&] { return !read(8)->admitted; });
      CHECK_EQ(pair.fabric.open("context"), 4);
      pair.finish();
    }
}

TEST(an_owners_card_that_dies_unseen_is_used_again_when_it_is_back) {
  Connected pair(nullptr, "verbs,tcp", true);
  // A region that the card has yet to register: its owner notices then, and nothing of ours is posted there any more.
  Bytes more = painted_bytes(4 * kMiB, 2);
  const auto remote = pair.owner->remote(pair.owner->share(more.data(), more.size()));
  const auto reads_by = [&](uint32_t rails, const auto& from, const Bytes& owned) {
    for (const Time limit = after(20); Clock::now() < limit;) {
      const OpRef op = pair.user->read(from, 0, pair.here.data(), pair.here.size());
      VerbsSide::expect_ok(op);
      CHECK(pair.here == owned);
      if (op->rails == rails) return true;
    }
    return false;
  };
  CHECK(reads_by(2, pair.remote, pair.owned));
  pair.fabric.kill("own0", true);
  CHECK(reads_by(1, remote, more));
  pair.fabric.revive("own0");
  CHECK(reads_by(2, remote, more));
  pair.finish();
}

TEST(a_card_that_is_not_back_is_waited_for_where_there_is_no_other_lane) {
  Connected pair;
  pair.fabric.kill("use0");
  const OpRef op = pair.user->read(pair.remote, 0, pair.here.data(), kMiB);
  CHECK(!op->wait(0.1));
  pair.fabric.revive("use0");
  VerbsSide::expect_ok(op);
  pair.fabric.kill("use0");
  const OpRef lost = pair.user->read(pair.remote, 0, pair.here.data(), kMiB);
  CHECK_EQ(VerbsSide::wait(lost), MR_PEER_LOST);
  CHECK(lost->status().text.find("use0") != std::string::npos);
  pair.finish();
}

// The owner's port goes down and comes back every few milliseconds, until it rests.
class Flapping {
 public:
  explicit Flapping(FakeFabric& fabric)
      : thread_([this, &fabric] {
          for (bool up = false; !over_; up = !up, ++changes_) {
            fabric.set_port("own0", up);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          }
          fabric.set_port("own0", true);
        }) {}
  ~Flapping() { rest(); }

  int changes() const { return changes_; }
  void rest() {
    over_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::atomic<int> changes_{0};
  std::thread thread_;
};

TEST(a_flapping_link_loses_nothing) {
  Connected pair(nullptr, "verbs,tcp");
  Flapping port(pair.fabric);
  uint64_t ended = 0;
  for (int round = 0; round < 20 || port.changes() < 40; ++round) {
    std::vector<OpRef> ops;
    for (uint64_t i = 0; i < 50; ++i)
      ops.push_back(pair.user->read(pair.remote, i * 512, pair.here.data() + i * 512, 512));
    for (const OpRef& op : ops) {
      VerbsSide::expect_ok(op);
      ++ended;
    }
    CHECK(std::equal(pair.here.begin(), pair.here.begin() + 50 * 512, pair.owned.begin()));
    std::fill(pair.here.begin(), pair.here.end(), 0);
  }
  port.rest();
  CHECK(ended >= 1000u);
  CHECK(pair.comes_down_to(4));
  pair.finish();
}

TEST(a_small_write_notifies_once_whatever_becomes_of_its_request) {
  for (const Fate::Kind kind : {Fate::carry_out, Fate::fail_before, Fate::fail_after}) {
    for (const uint64_t size : {8, 3000}) {
      Connected pair(nullptr, "verbs,tcp");
      const Bytes fresh = painted_bytes(size, 7);
      std::atomic<int> left{1};
      pair.fabric.decide(
          [&](const auto& request) { return !request.pieces.empty() && left.fetch_sub(1) == 1 ? Fate{kind} : Fate{}; });
      for (const uint64_t number : {77, 78}) {  // another one of the first would come before the second
        const OpRef op = pair.user->write_and_notify(pair.remote, 64, fresh, number);
        VerbsSide::expect_ok(op);
        CHECK_EQ(op->remote_state, MR_WRITTEN);
        CHECK(std::equal(fresh.begin(), fresh.end(), pair.owned.begin() + 64));
        uint64_t value = 0;
        CHECK_EQ(pair.region->next_notification(0, &value), 1);
        CHECK_EQ(value, number);
      }
      uint64_t value = 0;
      CHECK_EQ(pair.region->next_notification(0, &value), 0);
      pair.finish();
    }
  }
}

TEST(a_write_that_is_refused_does_not_notify) {
  Connected pair;
  std::atomic<bool> refuses{true};
  pair.fabric.decide([&](const auto& request) {
    return refuses && !request.pieces.empty() ? Fate{Fate::fail_before, IBV_WC_REM_ACCESS_ERR} : Fate{};
  });
  const Bytes fresh = painted_bytes(8, 7);
  const int end = VerbsSide::wait(pair.user->write_and_notify(pair.remote, 0, fresh, 77));
  CHECK(end == MR_ACCESS_DENIED || end == MR_PEER_LOST);  // the owner knows nothing of it
  refuses = false;
  VerbsSide::expect_ok(pair.user->write_and_notify(pair.remote, 0, fresh, 78));
  uint64_t value = 0;
  CHECK_EQ(pair.region->next_notification(0, &value), 1);
  CHECK_EQ(value, 78u);
  pair.finish();
}

TEST(a_write_whose_end_is_not_known_when_a_side_ends_does_not_notify) {
  for (const bool owner_ends : {true, false}) {
    Connected pair;
    pair.fabric.decide([](const auto& request) { return request.pieces.empty() ? Fate{} : Fate{Fate::hold}; });
    const Bytes fresh = painted_bytes(8, 7);
    const OpRef op = pair.user->write_and_notify(pair.remote, 0, fresh, 77);
    CHECK(!op->admitted);  // its caller has posted it
    (owner_ends ? pair.owner : pair.user)->close();
    const int end = VerbsSide::wait(op);
    CHECK(owner_ends ? end == MR_PEER_LOST || end == MR_ACCESS_DENIED : end == MR_CANCELLED);
    uint64_t value = 0;
    CHECK(pair.region->next_notification(0, &value) != 1);
    pair.finish();
  }
}

TEST(a_flapping_link_delivers_each_notification_once) {
  Connected pair(nullptr, "verbs,tcp");
  Flapping port(pair.fabric);
  const Bytes fresh = painted_bytes(512, 7);
  std::vector<uint64_t> sent, got;
  while (sent.size() < 1000 || port.changes() < 40) {
    std::vector<OpRef> ops;
    for (uint64_t i = 0; i < 50; ++i) {
      sent.push_back(sent.size());
      ops.push_back(pair.user->write_and_notify(pair.remote, i * 512, fresh, sent.back()));
    }
    for (const OpRef& op : ops) VerbsSide::expect_ok(op);
    for (uint64_t i = 0; i < 50; ++i) CHECK(std::equal(fresh.begin(), fresh.end(), pair.owned.begin() + i * 512));
    std::fill(pair.owned.begin(), pair.owned.end(), 0);
    for (uint64_t value = 0; pair.region->next_notification(0, &value) == 1;) got.push_back(value);
  }
  port.rest();
  std::sort(got.begin(), got.end());
  CHECK(got == sent);
  pair.finish();
}

TEST(each_call_that_fails_while_connecting_leads_to_tcp_or_another_try) {
  for (const char* call : {"create_qp", "create_cq", "modify_qp", "post_send", "req_notify_cq", "reg_mr"}) {
    for (uint64_t skip = 0; skip < 4; ++skip) {
      VerbsPair pair(nullptr, "verbs,tcp");
      Bytes owned = painted_bytes(kMiB, 1), here(kMiB);
      const auto remote = pair.owner->remote(pair.owner->share(owned.data(), owned.size()));
      pair.fabric.fail_call(call, ENOMEM, skip);
      for (int i = 0; i < 3; ++i) {
        std::fill(here.begin(), here.end(), 0);
        VerbsSide::expect_ok(pair.user->read(remote, 0, here.data(), here.size()));
        CHECK(here == owned);
      }
      pair.finish();
    }
  }
}

TEST(an_operation_without_another_lane_waits_for_the_rail_within_its_deadline) {
  Connected pair;
  pair.fabric.set_port("own0", false);
  const OpRef late = pair.user->read(pair.remote, 0, pair.here.data(), kMiB, 0.2);
  const int end = VerbsSide::wait(late);
  CHECK(end == MR_TRANSFER_TIMEOUT || end == MR_PEER_LOST);
  const OpRef waits = pair.user->read(pair.remote, 0, pair.here.data(), kMiB, 30);
  CHECK(!waits->wait(0.05));
  pair.fabric.set_port("own0", true);
  VerbsSide::expect_ok(waits);
  pair.finish();
}

TEST(deadlines_and_cancels_end_what_hangs_and_its_memory_is_let_alone) {
  Connected pair;
  std::atomic<bool> hold{true};
  pair.fabric.decide([&](const auto& request) { return hold && !request.pieces.empty() ? Fate{Fate::hold} : Fate{}; });
  for (const bool cancel : {false, true})
    for (const bool write : {false, true}) {
      const Time begun = Clock::now();
      const OpRef op = write ? pair.user->write(pair.remote, 0, pair.here.data(), 2 * kMiB, cancel ? 30 : 0.1)
                             : pair.user->read(pair.remote, 0, pair.here.data(), 2 * kMiB, cancel ? 30 : 0.1);
      if (cancel) pair.user->node->peer_of(Address::parse(pair.remote->address))->stop(op, MR_CANCELLED);
      CHECK_EQ(VerbsSide::wait(op), cancel ? MR_CANCELLED : MR_TRANSFER_TIMEOUT);
      CHECK(Clock::now() - begun < std::chrono::seconds(25));
      if (write) CHECK(op->remote_state != MR_WRITTEN);
    }
  std::fill(pair.here.begin(), pair.here.end(), 7);
  hold = false;
  pair.fabric.kick();
  const OpRef op = pair.user->read(pair.remote, 0, pair.here.data(), 8);
  VerbsSide::expect_ok(op);
  CHECK(mr::test::all(pair.here.data() + 8, pair.here.size() - 8, 7));
  CHECK(mr::test::painted(pair.owned.data(), pair.owned.size(), 1));
  pair.finish();
}

TEST(completions_that_never_come_end_at_the_deadline) {
  Connected pair;
  std::atomic<bool> lost{false};
  pair.fabric.decide(
      [&](const auto& request) { return !request.pieces.empty() && !lost.exchange(true) ? Fate{Fate::lose} : Fate{}; });
  CHECK_EQ(VerbsSide::wait(pair.user->read(pair.remote, 0, pair.here.data(), 100000, 0.3)), MR_TRANSFER_TIMEOUT);
  VerbsSide::expect_ok(pair.user->read(pair.remote, 0, pair.here.data(), 100000));
  pair.finish();
}

TEST(an_atomic_is_never_repeated) {
  for (const auto kind : {Fate::fail_before, Fate::fail_after}) {
    VerbsPair pair([](mr_options& raw) { raw.verbs_atomics = 1; });
    alignas(8) uint64_t word = 5, seen = 0;
    const auto remote = pair.owner->remote(pair.owner->share(&word, sizeof word));
    VerbsSide::expect_ok(pair.user->read(remote, 0, &seen, 8));
    pair.fabric.decide(
        [kind](const auto& request) { return request.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? Fate{kind} : Fate{}; });
    const View view = View::contiguous(0, 8);
    const OpRef op = pair.user->begin(Verb::fetch_add, remote, view, nullptr, view, 30, 0, 10);
    CHECK_EQ(VerbsSide::wait(op), MR_PEER_LOST);
    CHECK_EQ(op->remote_state, MR_UNKNOWN);
    VerbsSide::expect_ok(pair.user->read(remote, 0, &seen, 8));
    CHECK_EQ(seen, kind == Fate::fail_after ? 15u : 5u);
    pair.finish();
  }
}

TEST(a_peer_that_ends_ends_all_operations_each_once) {
  for (const bool large : {false, true}) {
    Connected pair;
    pair.fabric.decide([](const auto& request) { return request.pieces.empty() ? Fate{} : Fate{Fate::hold}; });
    std::vector<OpRef> ops;
    for (uint64_t i = 0; i < 50; ++i)
      ops.push_back(pair.user->read(pair.remote, i * 64, pair.here.data() + i * 64, large ? kMiB : 64));
    const Time begun = Clock::now();
    pair.owner->close();
    for (const OpRef& op : ops) {
      const int end = VerbsSide::wait(op);  // its regions end first
      CHECK(end == MR_PEER_LOST || end == MR_ACCESS_DENIED);
    }
    CHECK(Clock::now() - begun < std::chrono::seconds(25));
    CHECK(mr::test::all(pair.here.data(), pair.here.size(), 0));
    pair.finish();
  }
}

TEST(an_engine_that_closes_ends_its_operations) {
  Connected pair;
  pair.fabric.decide([](const auto& request) { return request.pieces.empty() ? Fate{} : Fate{Fate::hold}; });
  std::vector<OpRef> ops;
  for (uint64_t i = 0; i < 20; ++i)
    ops.push_back(pair.user->read(pair.remote, i * kMiB / 8, pair.here.data() + i * kMiB / 8, kMiB / 8));
  pair.user->close();
  for (const OpRef& op : ops) CHECK_EQ(VerbsSide::wait(op), MR_CANCELLED);
  pair.finish();
}

TEST(a_drop_under_traffic_ends_the_traffic_and_waits_for_no_peer) {
  Connected pair;
  std::vector<OpRef> ops;
  for (int i = 0; i < 40; ++i) ops.push_back(pair.user->read(pair.remote, 0, pair.here.data(), pair.here.size()));
  VerbsSide::expect_ok(pair.owner->drop(pair.region));
  std::fill(pair.owned.begin(), pair.owned.end(), 0xaa);  // the memory is the program's again
  for (const OpRef& op : ops) {
    const int end = VerbsSide::wait(op);
    CHECK(end == MR_OK || end == MR_ACCESS_DENIED);
  }
  pair.finish();
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
