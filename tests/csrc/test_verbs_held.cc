// A kernel that does not return from calls, on the fake fabric: operations end at their deadline all the same, their
// memory is let alone afterwards, other rails and peers go on, and an engine that closes does not wait for ever.
#include <algorithm>

#include "check.h"
#include "verbs_stuck.h"

using namespace mr;
using mr::test::seconds_since;
using mr::test::Stuck;
using mr::test::VerbsSide;

namespace {

constexpr uint64_t kMiB = 1u << 20;
constexpr double kTimeout = mr::test::kStuckTimeout;

// All calls that the kernel may sit on once an engine is up.
const char* const kCalls[] = {"modify_qp", "destroy_qp", "create_qp", "destroy_cq", "reg_mr", "dereg_mr", "query_gid"};

}  // namespace

TEST(operations_end_at_their_deadline_whatever_call_the_kernel_holds) {
  for (const char* call : kCalls)
    for (const bool keep : {false, true}) {
      Stuck pair;
      if (keep) pair.user->domain->keep(pair.here.data(), pair.here.size());
      pair.fabric.gates().hold(call);
      const Time begun = Clock::now();
      std::vector<OpRef> ops;
      for (const uint64_t length : {uint64_t{8}, uint64_t{4096}, uint64_t{48 << 10}, 4 * kMiB})
        for (const bool write : {false, true}) ops.push_back(pair.begin(write, length));
      for (const OpRef& op : ops) {
        const int end = VerbsSide::wait(op);
        if (end != MR_TRANSFER_TIMEOUT)
          mr::test::check_failed(__FILE__, __LINE__, std::string(call) + ": " + op->status().text);
        CHECK(op->remote_state != MR_WRITTEN);
      }
      CHECK(!ops[0]->admitted);  // it had no timer
      const double took = seconds_since(begun);
      if (took > kTimeout + 25)
        mr::test::check_failed(__FILE__, __LINE__, call + std::string(" took ") + std::to_string(took));
      CHECK(mr::test::all(pair.here.data(), pair.here.size(), 7));
      // The memory is the program's again: nothing reads or writes it, though the card goes on with what it had.
      std::fill(pair.here.begin(), pair.here.end(), 9);
      pair.go_on();
      pair.fabric.raise("use0", IBV_EVENT_PORT_ACTIVE);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // an overwrite would be seen by then, as a rule
      CHECK(mr::test::all(pair.here.data(), pair.here.size(), 9));
      const bool nines = pair.fabric.at_rest(
          [&] { return std::search_n(pair.owned.begin(), pair.owned.end(), 8, uint8_t{9}) != pair.owned.end(); });
      CHECK(!nines);
      pair.finish();
    }
}

TEST(an_operation_whose_memory_can_not_be_taken_from_the_card_waits_for_that) {
  for (const bool card_goes_on : {true, false}) {
    Stuck pair;
    const uint64_t before = pair.fabric.calls("post_send");
    const OpRef op = pair.begin(false, card_goes_on ? 48 << 10 : 4 * kMiB, 2);
    while (pair.fabric.calls("post_send") == before) std::this_thread::yield();
    for (const char* call : {"modify_qp", "destroy_qp", "dereg_mr"}) pair.fabric.gates().hold(call);
    CHECK(!op->wait(2.5));
    if (card_goes_on)
      pair.go_on();
    else
      pair.fabric.gates().let_go();
    const int end = VerbsSide::wait(op);
    CHECK(end == MR_TRANSFER_TIMEOUT || (end == MR_OK && card_goes_on));
    pair.finish();
  }
}

TEST(what_another_rail_and_a_kept_queue_pair_can_do_goes_on) {
  for (const char* call : {"modify_qp", "destroy_qp", "create_qp", "reg_mr"}) {
    Stuck pair("verbs", true);
    pair.stuck = false;
    pair.fabric.gates().hold(call);
    pair.fabric.set_port("own0", false);
    for (int i = 0; i < 20; ++i)
      for (const uint64_t length : {uint64_t{8}, 4 * kMiB}) {
        std::fill(pair.here.begin(), pair.here.end(), 7);
        VerbsSide::expect_ok(pair.begin(false, length, 30));
        CHECK(mr::test::painted(pair.here.data(), length, 1));
      }
    pair.finish();
  }
}

TEST(a_cancelled_operation_ends_though_the_kernel_holds_its_queue_pair) {
  for (const char* call : {"modify_qp", "destroy_qp"})
    for (const uint64_t length : {uint64_t{8}, 4 * kMiB}) {
      Stuck pair;
      pair.fabric.gates().hold(call);
      const OpRef op = pair.begin(false, length, 60);
      pair.user->node->peer_of(Address::parse(pair.remote->address))->stop(op, MR_CANCELLED);
      CHECK_EQ(VerbsSide::wait(op), MR_CANCELLED);
      CHECK(op->seconds() < 30);
      pair.go_on();
      pair.finish();
    }
}

TEST(a_drop_does_not_wait_for_what_else_is_asked_of_the_card) {
  Stuck pair("verbs,tcp");
  pair.stuck = false;
  Bytes other(kMiB);
  const RegionRef region = pair.owner->share(other.data(), other.size());
  const auto remote = pair.owner->remote(region);
  VerbsSide::expect_ok(pair.user->read(remote, 0, pair.here.data(), kMiB));
  Bytes third(kMiB);
  const auto unknown = pair.owner->remote(pair.owner->share(third.data(), third.size()));
  pair.fabric.gates().hold("reg_mr");
  const OpRef waits = pair.user->read(unknown, 0, pair.here.data(), kMiB, kTimeout);
  pair.fabric.gates().await(1);
  VerbsSide::expect_ok(pair.owner->drop(region));
  CHECK_EQ(VerbsSide::wait(waits), MR_TRANSFER_TIMEOUT);
  pair.finish();
}

TEST(memory_is_registered_while_the_kernel_holds_what_was) {
  Stuck pair;
  pair.stuck = false;
  Bytes other(kMiB);
  const RegionRef region = pair.owner->share(other.data(), other.size());
  pair.fabric.gates().hold("dereg_mr");
  VerbsSide::expect_ok(pair.begin(false, 4 * kMiB, 30));  // whose own registration is being taken away now
  for (int i = 0; i < 5; ++i) {
    VerbsSide::expect_ok(pair.user->read(pair.owner->remote(region), 0, pair.here.data(), kMiB));
    VerbsSide::expect_ok(pair.begin(false, 4 * kMiB, 30));
  }
  pair.finish();
}

TEST(a_drop_tells_that_the_kernel_does_not_let_go_of_the_memory) {
  Stuck pair;
  pair.stuck = false;
  Bytes other(kMiB);
  const RegionRef region = pair.owner->share(other.data(), other.size());
  VerbsSide::expect_ok(pair.user->read(pair.owner->remote(region), 0, pair.here.data(), kMiB));
  pair.fabric.gates().hold("dereg_mr");
  CHECK_EQ(VerbsSide::wait(pair.owner->drop(region)), MR_TRANSFER_TIMEOUT);
  pair.finish();
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
