// An engine on the verbs lane that closes while the kernel holds calls and does not return.
#include <thread>

#include "check.h"
#include "verbs_stuck.h"

using namespace mr;
using mr::test::seconds_since;
using mr::test::Stuck;
using mr::test::VerbsSide;

namespace {

constexpr uint64_t kMiB = 1u << 20;

}  // namespace

TEST(an_engine_that_closes_gives_up_on_a_kernel_that_lets_go_of_nothing) {
  Stuck pair;
  const uint64_t before = pair.fabric.calls("post_send");
  const OpRef op = pair.begin(false, 4 * kMiB, 60);
  while (pair.fabric.calls("post_send") == before) std::this_thread::yield();
  for (const char* call : {"modify_qp", "destroy_qp", "dereg_mr"}) pair.fabric.gates().hold(call);
  const Time begun = Clock::now();
  pair.user->close();
  CHECK(seconds_since(begun) < 45);
  CHECK_EQ(VerbsSide::wait(op), MR_CANCELLED);
  pair.finish();
}

TEST(an_engine_that_closes_does_not_wait_for_ever) {
  for (const char* call : {"modify_qp", "dereg_mr", "close_device"}) {
    Stuck pair;
    std::vector<OpRef> ops;
    for (const uint64_t length : {uint64_t{8}, 4 * kMiB}) ops.push_back(pair.begin(false, length, 60));
    CHECK(!ops[0]->admitted);
    pair.fabric.gates().hold(call);
    const Time begun = Clock::now();
    std::thread owner([&] { pair.owner->close(); });
    pair.user->close();
    owner.join();
    CHECK(seconds_since(begun) < 45);
    for (const OpRef& op : ops) {
      const int end = VerbsSide::wait(op);
      CHECK(end == MR_CANCELLED || end == MR_PEER_LOST || end == MR_ACCESS_DENIED);
    }
    CHECK(mr::test::all(pair.here.data(), pair.here.size(), 7));
    pair.go_on();
    pair.finish();
  }
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
