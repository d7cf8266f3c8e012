// Small operations and the NUMA nodes of the threads that begin them, on the fake fabric with a host of two nodes.
#include <sched.h>

#include "check.h"
#include "sysfs_tree.h"
#include "transport/near_rails.h"
#include "verbs_side.h"

using namespace mr;
using mr::test::SysfsTree;
using mr::test::VerbsPair;
using mr::test::VerbsSide;

namespace {

// The thread's processors, as they were, at the end.
class OnCore {
 public:
  OnCore() { ::sched_getaffinity(0, sizeof all_, &all_); }
  ~OnCore() { ::sched_setaffinity(0, sizeof all_, &all_); }
  std::vector<size_t> allowed() const {
    std::vector<size_t> out;
    for (size_t core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &all_)) out.push_back(core);
    return out;
  }
  static void move_to(size_t core) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    CHECK_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  }

 private:
  cpu_set_t all_;
};

void two_nodes(SysfsTree& tree, const std::string& first, const std::string& second) {
  tree.node(0, first, 0, "10 21");
  tree.node(1, second, 1, "21 10");
  const std::string paths[] = {"pci0000:17/0000:17:01.0/0000:18:00.0", "pci0000:a7/0000:a7:01.0/0000:a8:00.0"};
  for (int node = 0; node < 2; ++node) {
    tree.pci(paths[node], node);
    for (const char* side : {"own", "use"}) tree.card(side + std::to_string(node), paths[node]);
  }
}

}  // namespace

TEST(an_order_of_rails_for_each_node) {
  SysfsTree tree;
  mr::test::two_socket_host(tree);
  const Topology topology(tree.root());
  const auto at = [&](const std::string& address) { return topology.of_pci(address); };
  const NearRails rails({at("0000:aa:00.0"), at("0000:1a:00.0"), at("0000:38:00.0")}, topology);
  CHECK_EQ(rails.num_orders(), 3u);
  const std::vector<size_t> node_0{1, 2, 0}, node_1{2, 1, 0}, node_2{0, 1, 2};  // 3 is as near as 2
  CHECK(rails.order(0) == node_0);
  CHECK(rails.order(1) == node_1);
  CHECK(rails.order(2) == node_2);
  CHECK(rails.here() < 3);
}

TEST(one_order_where_all_are_as_near) {
  SysfsTree tree;
  tree.node(0, "0-7", 0, "10");
  const Place unknown, card{{"pci0000:00", "0000:00:01.0"}, 0};
  for (const Topology& topology : {Topology(tree.root()), Topology(tree.root() + "/nothing")}) {
    const NearRails rails({unknown, card}, topology);
    CHECK_EQ(rails.num_orders(), 1u);
    CHECK_EQ(rails.here(), 0u);
    CHECK_EQ(rails.order(0).size(), 2u);
  }
}

TEST(a_small_operation_takes_the_rail_that_is_nearest_to_its_thread) {
  OnCore cores;
  const auto allowed = cores.allowed();
  if (allowed.size() < 2) return;  // all threads are at one place
  SysfsTree tree;
  two_nodes(tree, std::to_string(allowed[0]), std::to_string(allowed[1]));
  VerbsPair pair(nullptr, "verbs", true, nullptr, false, mr::test::FakeFabric::verbs(), Topology(tree.root()));
  uint64_t owned = 7, here = 0;
  const auto remote = pair.owner->remote(pair.owner->share(&owned, sizeof owned));
  const auto cards_of_reads = [&](int count) {
    std::set<std::string> cards;
    pair.fabric.keep_log(true);
    for (int i = 0; i < count; ++i) VerbsSide::expect_ok(pair.user->read(remote, 0, &here, sizeof here));
    for (const auto& request : pair.fabric.requests())
      if (request.opcode == IBV_WR_RDMA_READ) cards.insert(request.card);
    return cards;
  };
  const auto all_by = [&](const std::string& card) {
    return [&, card] { return cards_of_reads(20) == std::set<std::string>{card}; };
  };
  const auto comes_true = [](const auto& wanted) {
    for (const Time limit = after(20); Clock::now() < limit;)
      if (wanted()) return true;
    return false;
  };
  OnCore::move_to(allowed[0]);
  CHECK(comes_true(all_by("use0")));
  OnCore::move_to(allowed[1]);  // by the far one, until the other is connected
  CHECK(comes_true(all_by("use1")));
  CHECK(all_by("use1")());
  OnCore::move_to(allowed[0]);
  CHECK(all_by("use0")());
  pair.fabric.set_port("use0", false);
  CHECK(comes_true(all_by("use1")));
  pair.fabric.set_port("use0", true);
  CHECK(comes_true(all_by("use0")));
  pair.finish();
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
