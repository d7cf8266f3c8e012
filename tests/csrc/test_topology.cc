// Distances between cards, GPUs and memory, on recorded hosts.
#include "transport/topology.h"

#include <sched.h>
#include <sys/mman.h>

#include "check.h"
#include "sysfs_tree.h"

using namespace mr;
using mr::test::SysfsTree;

namespace {

Place node(int number) { return Place{{}, number}; }

}  // namespace

TEST(a_card_is_placed_by_its_path_on_the_buses) {
  SysfsTree tree;
  two_socket_host(tree);
  tree.card("mlx5_0", "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0/0000:1a:00.0");
  const Place place = Topology(tree.root()).of_device("class/infiniband/mlx5_0/device");
  CHECK_EQ(place.numa, 0);
  CHECK_EQ(place.address(), "0000:1a:00.0");
  CHECK_EQ(place.pci.size(), 5u);
  CHECK_EQ(place.pci.front(), "pci0000:17");
}

TEST(distances_on_two_sockets) {
  SysfsTree tree;
  two_socket_host(tree);
  const Topology topology(tree.root());
  const auto at = [&](const std::string& address) { return topology.of_pci(address); };
  const Place card = at("0000:1a:00.0");
  CHECK_EQ(topology.between(card, at("0000:1b:00.0")), Distance::same_switch);
  CHECK_EQ(topology.between(card, at("0000:1c:00.0")), Distance::same_root);
  CHECK_EQ(topology.between(card, at("0000:38:00.0")), Distance::same_socket);
  CHECK_EQ(topology.between(card, at("0000:ab:00.0")), Distance::other_socket);
  CHECK_EQ(topology.between(card, node(0)), Distance::same_node);
  CHECK_EQ(topology.between(card, node(1)), Distance::same_socket);
  CHECK_EQ(topology.between(card, node(3)), Distance::other_socket);
  for (const char* other : {"0000:1b:00.0", "0000:1c:00.0", "0000:38:00.0", "0000:ab:00.0"})
    CHECK_EQ(topology.between(card, at(other)), topology.between(at(other), card));
  CHECK(Distance::same_switch < Distance::same_root && Distance::same_root < Distance::same_node &&
        Distance::same_node < Distance::same_socket && Distance::same_socket < Distance::other_socket);
}

TEST(two_functions_of_one_card_share_its_switch) {
  SysfsTree tree;
  tree.node(0, "0-7", 0, "10");
  tree.pci("pci0000:40/0000:40:01.1/0000:41:00.0", 0);
  tree.pci("pci0000:40/0000:40:01.1/0000:41:00.1", 0);
  const Topology topology(tree.root());
  CHECK_EQ(topology.between(topology.of_pci("0000:41:00.0"), topology.of_pci("0000:41:00.1")), Distance::same_switch);
}

TEST(memory_without_cores_belongs_to_the_nearest_socket) {
  SysfsTree tree;
  tree.node(0, "0-71", 0, "10 40 80 120");
  tree.node(1, "72-143", 1, "40 10 120 80");
  tree.node(2, "", -1, "80 120 10 140");  // of the accelerator at socket 0
  tree.node(3, "", -1, "120 80 140 10");
  tree.pci("pci0000:00/0000:00:00.0/0000:01:00.0", 0);
  const Topology topology(tree.root());
  const Place card = topology.of_pci("0000:01:00.0");
  CHECK_EQ(topology.between(card, node(2)), Distance::same_socket);
  CHECK_EQ(topology.between(card, node(3)), Distance::other_socket);
}

TEST(a_virtual_machine_that_hides_its_nodes) {
  SysfsTree one, two;
  one.node(0, "0-15", 0, "10");
  two.node(0, "0-7", 0, "10 20");
  two.node(1, "8-15", 1, "20 10");
  for (SysfsTree* tree : {&one, &two}) {
    tree->pci("pci0000:00/0000:00:05.0", -1);
    tree->pci("pci0001:00/0001:00:02.0", -1);
  }
  for (const auto& [tree, distance] : {std::pair{&one, Distance::same_node}, {&two, Distance::unknown}}) {
    const Topology topology(tree->root());
    CHECK_EQ(topology.between(topology.of_pci("0000:00:05.0"), topology.of_pci("0001:00:02.0")), distance);
    CHECK_EQ(topology.between(topology.of_pci("0000:00:05.0"), node(0)), distance);
  }
}

TEST(one_root_above_two_sockets_is_not_believed) {
  SysfsTree tree;
  tree.node(0, "0-7", 0, "10 20");
  tree.node(1, "8-15", 1, "20 10");
  tree.pci("pci0000:00/0000:00:05.0", 0);
  tree.pci("pci0000:00/0000:00:06.0", 1);
  tree.pci("pci0000:00/0000:00:07.0", 1);
  const Topology topology(tree.root());
  const auto at = [&](const std::string& address) { return topology.of_pci(address); };
  CHECK_EQ(topology.between(at("0000:00:05.0"), at("0000:00:06.0")), Distance::other_socket);
  CHECK_EQ(topology.between(at("0000:00:07.0"), at("0000:00:06.0")), Distance::same_root);
}

TEST(what_is_not_there_has_no_place) {
  SysfsTree tree;
  const Topology topology(tree.root());
  CHECK(topology.of_device("class/infiniband/mlx5_7/device").pci.empty());
  CHECK_EQ(topology.of_pci("0000:99:00.0").numa, -1);
  CHECK(topology.nodes().empty());
  CHECK_EQ(topology.read("class/net/eth0/mtu"), "");
  tree.file("class/net/eth0/mtu", "1500");
  CHECK_EQ(topology.read("class/net/eth0/mtu"), "1500");
  CHECK_EQ(topology.read("class/net/eth0"), "");  // it opens, but reading fails: like an attribute without a value
  CHECK_EQ(topology.between(Place{}, Place{}), Distance::same_node);  // of one node, or a kernel without NUMA
}

TEST(this_process_finds_its_own_memory) {
  const Topology topology;
  void* page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(page != MAP_FAILED);
  static_cast<char*>(page)[77] = 1;
  const int found = topology.of_memory(static_cast<char*>(page) + 77).numa;
  ::munmap(page, 4096);
  const auto nodes = topology.nodes();
  // A kernel without NUMA, and a container that forbids the question, tell nothing.
  CHECK(found == -1 || nodes.empty() || std::find(nodes.begin(), nodes.end(), found) != nodes.end());
  CHECK_EQ(topology.of_memory(nullptr).numa, -1);
}

TEST(a_process_is_placed_where_it_may_run) {
  cpu_set_t before, one;
  CHECK_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  size_t core = 0;
  while (!CPU_ISSET(core, &before)) ++core;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  CHECK_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  const std::string ours = std::to_string(core), others = std::to_string(core + 1) + "-4095";
  SysfsTree tree;
  tree.node(0, core == 0 ? others : "0-" + std::to_string(core - 1) + "," + others, 0, "10 20");
  tree.node(1, ours, 1, "20 10");
  const int bound = Topology(tree.root()).of_this_process().numa;
  SysfsTree nowhere;
  nowhere.node(0, others, 0, "10");
  const int unknown = Topology(nowhere.root()).of_this_process().numa;
  ::sched_setaffinity(0, sizeof before, &before);
  CHECK_EQ(bound, 1);
  CHECK_EQ(unknown, -1);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
