// Many peers of one engine on the verbs lane at once, on the fake fabric: all are served, and none waits for all
// others.
#include <algorithm>

#include "check.h"
#include "pattern.h"
#include "verbs_side.h"

using namespace mr;
using mr::test::FakeFabric;
using mr::test::VerbsSide;

TEST(peers_that_connect_at_once_are_all_served) {
  constexpr uint64_t kPeers = 240, kBytes = 1024;
  FakeFabric fabric;
  fabric.add_card("own0", 0).attributes.max_qp = 4 * kPeers;
  for (uint8_t i = 1; i <= 4; ++i) fabric.add_card("use" + std::to_string(i), i);
  const auto lean = [](mr_options& raw) {
    raw.verbs_queue_pairs = 1;
    raw.connect_timeout = 60;
  };
  VerbsSide owner("owner", "own0", "verbs", lean);
  Bytes owned(kPeers * kBytes);
  mr::test::paint(owned.data(), owned.size(), 1);
  const auto remote = owner.remote(owner.share(owned.data(), owned.size()));
  std::vector<std::unique_ptr<VerbsSide>> peers;
  for (uint64_t i = 0; i < kPeers; ++i)
    peers.push_back(
        std::make_unique<VerbsSide>("peer" + std::to_string(i), "use" + std::to_string(1 + i % 4), "verbs", lean));
  Bytes here(owned.size());
  std::vector<OpRef> ops;
  for (uint64_t i = 0; i < kPeers; ++i)
    ops.push_back(peers[i]->read(remote, i * kBytes, here.data() + i * kBytes, kBytes, 60));
  for (const OpRef& op : ops) {
    VerbsSide::expect_ok(op);
    CHECK_EQ(std::string(op->lane), "verbs");
  }
  CHECK(here == owned);
  // Each has one queue pair here, made in the order in which they asked; nobody had to ask twice.
  for (const auto& peer : peers) {
    CHECK_EQ(peer->counter("verbs_pairs_opened"), 1u);
    CHECK_EQ(peer->counter("verbs_pairs_lost"), 0u);
  }
  CHECK_EQ(fabric.open("qp"), static_cast<int>(2 * kPeers));
  std::vector<double> seconds;
  for (const OpRef& op : ops) seconds.push_back(op->seconds());
  std::sort(seconds.begin(), seconds.end());
  std::printf("     the first after %.2f s, half after %.2f s, the last after %.2f s\n", seconds.front(),
              seconds[kPeers / 2], seconds.back());
  peers.clear();
  owner.close();
  for (const char* what : {"qp", "cq", "mr", "pd", "channel", "context"}) {
    for (const Time limit = after(20); fabric.open(what) != 0 && Clock::now() < limit;) std::this_thread::yield();
    CHECK_EQ(fabric.open(what), 0);
  }
  CHECK(fabric.violations().empty());
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
