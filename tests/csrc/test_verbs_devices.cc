// Facts about cards, as libibverbs and /sys tell them on recorded hosts: behind a table of functions, and in a folder.
#include "transport/verbs_devices.h"

#include <arpa/inet.h>

#include <algorithm>
#include <map>
#include <memory>

#include "check.h"
#include "sysfs_tree.h"
#include "transport/verbs_describe.h"

using namespace mr;
using mr::test::SysfsTree;

namespace {

struct RecordedPort {
  ibv_port_attr attr{};
  std::map<uint32_t, ibv_gid_entry> gids;
};

struct RecordedCard : ibv_device {
  std::vector<RecordedPort> ports;
  int open_error = 0, query_port_error = 0;
  ibv_device_attr attr{};

  explicit RecordedCard(const std::string& card, ibv_transport_type transport = IBV_TRANSPORT_IB,
                        ibv_node_type node = IBV_NODE_CA)
      : ibv_device{} {
    transport_type = transport;
    node_type = node;
    std::snprintf(name, sizeof name, "%s", card.c_str());
    std::snprintf(dev_name, sizeof dev_name, "uverbs_of_%.40s", card.c_str());
    attr.max_qp = 131072;
    attr.max_sge = 30;
    attr.max_qp_rd_atom = 16;
    attr.max_mr_size = UINT64_MAX;
    attr.atomic_cap = IBV_ATOMIC_HCA;
    std::snprintf(attr.fw_ver, sizeof attr.fw_ver, "28.39.1002");
  }

  RecordedPort& roce(ibv_mtu mtu = IBV_MTU_4096) {
    ports.emplace_back();
    ports.back().attr.state = IBV_PORT_ACTIVE;
    ports.back().attr.link_layer = IBV_LINK_LAYER_ETHERNET;
    ports.back().attr.active_mtu = mtu;
    ports.back().attr.gid_tbl_len = 16;
    return ports.back();
  }

  RecordedPort& infiniband(uint16_t lid) {
    RecordedPort& port = roce();
    port.attr.link_layer = IBV_LINK_LAYER_INFINIBAND;
    port.attr.lid = lid;
    port.attr.active_width = 2;   // 4X
    port.attr.active_speed = 64;  // HDR
    return port;
  }
};

void add_gid(RecordedPort& port, uint32_t index, const std::string& address, uint32_t type) {
  ibv_gid_entry& entry = port.gids[index];
  entry.gid_index = index;
  entry.gid_type = type;
  if (::inet_pton(AF_INET6, address.c_str(), entry.gid.raw) != 1) throw std::runtime_error("not an address");
}

// The host that the table tells about; contexts that are open.
std::vector<std::unique_ptr<RecordedCard>>* host;
int list_error, lists, contexts;

struct RecordedHost {
  std::vector<std::unique_ptr<RecordedCard>> cards;
  SysfsTree tree;

  RecordedHost() {
    host = &cards;
    list_error = lists = contexts = 0;
  }
  ~RecordedHost() { host = nullptr; }

  template <typename... Arguments>
  RecordedCard& add(Arguments... arguments) {
    cards.push_back(std::make_unique<RecordedCard>(arguments...));
    return *cards.back();
  }
};

RecordedCard& card_of(ibv_context* context) { return *static_cast<RecordedCard*>(context->device); }

Verbs table() {
  Verbs verbs{};
  verbs.get_device_list = [](int* count) -> ibv_device** {
    errno = list_error;
    if (list_error != 0) return nullptr;
    auto** list = new ibv_device*[host->size() + 1]();
    std::transform(host->begin(), host->end(), list, [](auto& card) { return card.get(); });
    *count = static_cast<int>(host->size());
    ++lists;
    return list;
  };
  verbs.free_device_list = [](ibv_device** list) {
    delete[] list;
    --lists;
  };
  verbs.get_device_name = [](ibv_device* device) -> const char* { return device->name; };
  verbs.open_device = [](ibv_device* device) -> ibv_context* {
    errno = static_cast<RecordedCard*>(device)->open_error;
    if (errno != 0) return nullptr;
    auto* context = new ibv_context{};
    context->device = device;
    ++contexts;
    return context;
  };
  verbs.close_device = [](ibv_context* context) {
    delete context;
    --contexts;
    return 0;
  };
  verbs.query_device = [](ibv_context* context, ibv_device_attr* attr) {
    *attr = card_of(context).attr;
    attr->phys_port_cnt = static_cast<uint8_t>(card_of(context).ports.size());
    return 0;
  };
  verbs.query_device_ex = [](ibv_context*, ibv_device_attr_ex*) { return EOPNOTSUPP; };
  verbs.query_port = [](ibv_context* context, uint8_t port, ibv_port_attr* attr) {
    *attr = card_of(context).ports.at(port - 1u).attr;
    return card_of(context).query_port_error;
  };
  verbs.query_gid = [](ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
    const auto& gids = card_of(context).ports.at(port - 1u).gids;
    const auto at = gids.find(static_cast<uint32_t>(index));
    *gid = at == gids.end() ? ibv_gid{} : at->second.gid;
    return 0;
  };
  verbs.query_gid_ex = [](ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry) {
    const auto& gids = card_of(context).ports.at(port - 1u).gids;
    const auto at = gids.find(index);
    if (at == gids.end()) return ENODATA;
    *entry = at->second;
    return 0;
  };
  return verbs;
}

// A mlx5 card in RoCE mode whose interface has an address, and a VLAN on it with another.
void add_mlx5(RecordedHost& recorded) {
  RecordedPort& port = recorded.add("mlx5_0").roce();
  const std::string slot = "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0/0000:1a:00.0";
  two_socket_host(recorded.tree);
  recorded.tree.driver(slot, "mlx5_core");
  recorded.tree.card("mlx5_0", slot, "ens1f0np0");
  recorded.tree.interface("ens1f0np0.100", "devices/virtual");
  recorded.tree.port("mlx5_0", 1, "Ethernet", "800 Gb/sec (4X XDR)");
  uint32_t index = 0;
  for (const auto& [netdev, address] : {std::pair{"ens1f0np0", "fe80::ba3f:d2ff:fe01:2"},
                                        {"ens1f0np0.100", "::ffff:10.100.0.5"},
                                        {"ens1f0np0", "::ffff:10.0.0.5"}})
    for (const auto& [type, text] :
         {std::pair{IBV_GID_TYPE_ROCE_V1, "IB/RoCE v1"}, {IBV_GID_TYPE_ROCE_V2, "RoCE v2"}}) {
      recorded.tree.gid_of("mlx5_0", 1, static_cast<int>(index), netdev, text);
      add_gid(port, index++, address, type);
    }
}

// Soft-RoCE on two interfaces, as `rdma link add` makes them.
void add_soft_roce(RecordedHost& recorded) {
  for (const std::string number : {"0", "1"}) {
    RecordedPort& port = recorded.add("rxe" + number).roce(IBV_MTU_1024);
    recorded.tree.card("rxe" + number, "", "rail" + number);
    recorded.tree.file("class/net/rail" + number + "/operstate", "unknown");  // of a dummy interface
    recorded.tree.port("rxe" + number, 1, "Ethernet", "2.5 Gb/sec (1X SDR)");
    recorded.tree.gid_of("rxe" + number, 1, 0, "rail" + number, "RoCE v2");
    recorded.tree.gid_of("rxe" + number, 1, 1, "rail" + number, "RoCE v2");
    add_gid(port, 0, "fe80::5054:ff:fe00:" + number, IBV_GID_TYPE_ROCE_V2);
    add_gid(port, 1, "::ffff:10.9." + number + ".1", IBV_GID_TYPE_ROCE_V2);
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(a_mlx5_card_is_read) {
  RecordedHost recorded;
  add_mlx5(recorded);
  const Verbs verbs = table();
  const auto devices = read_devices(verbs, Topology(recorded.tree.root()));
  CHECK_EQ(devices.size(), 1u);
  const DeviceFacts& device = devices[0];
  CHECK_EQ(device.driver, "mlx5_core");
  CHECK_EQ(device.firmware, "28.39.1002");
  CHECK_EQ(device.place.address(), "0000:1a:00.0");
  CHECK_EQ(device.place.numa, 0);
  CHECK(device.netdevs == std::vector<std::string>({"ens1f0np0"}));
  CHECK(device.atomics && device.max_rd_atomic == 16 && device.max_mr_size == UINT64_MAX);
  const PortFacts& port = device.ports.at(0);
  CHECK_EQ(port.gbits, 800.0);
  CHECK_EQ(port.mtu, 4096u);
  CHECK_EQ(port.gids.size(), 6u);
  CHECK_EQ(port.gids[3].netdev, "ens1f0np0.100");
  const auto choice = choose_rails(devices, {});
  CHECK_EQ(choice.rails.size(), 1u);
  CHECK_EQ(choice.rails[0].gid().index, 5u);
  CHECK_EQ(choice.verdicts[0].reason, "GID 5 ::ffff:10.0.0.5, RoCE v2, IPv4 of ens1f0np0");
  CHECK_EQ(contexts, 0);
  CHECK_EQ(lists, 0);
}

TEST(a_library_that_does_not_tell_types_of_gids) {
  RecordedHost recorded;
  add_mlx5(recorded);
  Verbs verbs = table();
  verbs.query_gid_ex = nullptr;
  CHECK_EQ(choose_rails(read_devices(verbs, Topology(recorded.tree.root())), {}).rails.at(0).gid().index, 5u);
}

TEST(entries_that_no_queue_pair_can_name_are_not_chosen) {
  RecordedHost recorded;
  add_soft_roce(recorded);
  RecordedPort& port = recorded.cards[0]->ports[0];
  port.attr.gid_tbl_len = 512;
  port.gids.erase(1);
  add_gid(port, 300, "::ffff:10.9.0.1", IBV_GID_TYPE_ROCE_V2);
  const Verbs verbs = table();
  CHECK_EQ(choose_rails(read_devices(verbs, Topology(recorded.tree.root())), {}).rails.at(0).gid().index, 0u);
}

TEST(soft_roce_is_read) {
  RecordedHost recorded;
  add_soft_roce(recorded);
  const Verbs verbs = table();
  const auto devices = read_devices(verbs, Topology(recorded.tree.root()));
  const auto choice = choose_rails(devices, {});
  CHECK_EQ(choice.rails.size(), 2u);
  for (uint32_t i = 0; i < 2; ++i) {
    CHECK_EQ(choice.rails[i].name(), "rxe" + std::to_string(i) + ":1");
    CHECK_EQ(choice.rails[i].group, i);
    CHECK_EQ(choice.rails[i].mtu, 1024u);
    CHECK_EQ(choice.rails[i].gid().text(), "::ffff:10.9." + std::to_string(i) + ".1");
    CHECK(choice.rails[i].place.pci.empty());
  }
}

TEST(soft_roce_on_a_network_card_sits_where_that_card_is) {
  RecordedHost recorded;
  add_soft_roce(recorded);
  two_socket_host(recorded.tree);
  recorded.tree.link("class/net/rail0/device", "devices/pci0000:37/0000:37:01.0/0000:38:00.0");
  const Verbs verbs = table();
  CHECK_EQ(read_devices(verbs, Topology(recorded.tree.root()))[0].place.address(), "0000:38:00.0");
}

TEST(infiniband_speed_without_the_kernels_figure) {
  RecordedHost recorded;
  RecordedCard& card = recorded.add("mlx5_2");
  add_gid(card.infiniband(17), 0, "fe80::b83f:d203:1:2", IBV_GID_TYPE_IB);
  add_gid(card.infiniband(18), 0, "fe80::b83f:d203:1:3", IBV_GID_TYPE_IB);
  card.ports[1].attr.flags = IBV_QPF_GRH_REQUIRED;
  const Verbs verbs = table();
  const auto choice = choose_rails(read_devices(verbs, Topology(recorded.tree.root())), {});
  CHECK_EQ(choice.rails.size(), 2u);
  CHECK_EQ(choice.rails[0].gbits, 200.0);
  CHECK_EQ(choice.rails[1].lid, 18);
  CHECK(!choice.rails[0].grh_required && choice.rails[1].grh_required);
}

TEST(iwarp_and_efa_are_told_apart_and_not_opened) {
  RecordedHost recorded;
  recorded.add("rdmap0s6", IBV_TRANSPORT_UNSPECIFIED, IBV_NODE_UNSPECIFIED).open_error = EIO;
  recorded.add("iwp49s0", IBV_TRANSPORT_IWARP, IBV_NODE_RNIC).open_error = EIO;
  recorded.tree.pci("pci0000:00/0000:00:06.0", -1);
  recorded.tree.driver("pci0000:00/0000:00:06.0", "efa");
  recorded.tree.card("rdmap0s6", "pci0000:00/0000:00:06.0");
  const Verbs verbs = table();
  const auto choice = choose_rails(read_devices(verbs, Topology(recorded.tree.root())), {});
  CHECK(choice.rails.empty());
  CHECK_EQ(choice.why_none(),
           "rdmap0s6: EFA: no RC, so it goes over tcp; iwp49s0: iWARP: no RC without rdma_cm, so it goes over tcp");
}

TEST(a_host_without_rdma) {
  RecordedHost recorded;
  const Verbs verbs = table();
  CHECK(read_devices(verbs, Topology(recorded.tree.root())).empty());
  list_error = ENOSYS;
  CHECK(read_devices(verbs, Topology(recorded.tree.root())).empty());
  list_error = EMFILE;
  CHECK_THROWS(Error, read_devices(verbs, Topology(recorded.tree.root())));
  const auto choice = choose_rails(verbs, Options::from(Options::defaults()), Topology(recorded.tree.root()));
  CHECK_EQ(choice.status.sys_errno, EMFILE);
  CHECK(contains(choice.why_none(), "ibv_get_device_list"));
}

TEST(a_container_without_the_device_files) {
  RecordedHost recorded;
  add_soft_roce(recorded);
  recorded.cards[0]->open_error = EACCES;
  recorded.cards[1]->query_port_error = EIO;
  const Verbs verbs = table();
  const auto choice = choose_rails(read_devices(verbs, Topology(recorded.tree.root())), {});
  CHECK(choice.rails.empty());
  CHECK(contains(choice.why_none(), "rxe0: ibv_open_device of rxe0: Permission denied"));
  CHECK(
      contains(choice.why_none(), "/dev/infiniband/uverbs_of_rxe0: No such file or directory (in a container: docker"));
  CHECK(contains(choice.why_none(), "rxe1: ibv_query_port of rxe1 port 1: Input/output error"));
  CHECK_EQ(contexts, 0);
}

TEST(a_card_that_cannot_be_opened_keeps_its_number) {
  RecordedHost recorded;
  add_soft_roce(recorded);
  recorded.cards[0]->open_error = EACCES;
  const Verbs verbs = table();
  const auto choice = choose_rails(read_devices(verbs, Topology(recorded.tree.root())), {});
  CHECK_EQ(choice.rails.size(), 1u);
  CHECK_EQ(choice.rails[0].group, 1u);
}

TEST(options_of_an_engine_reach_the_choice) {
  RecordedHost recorded;
  add_soft_roce(recorded);
  const Verbs verbs = table();
  mr_options raw = Options::defaults();
  raw.verbs_devices = "rxe1";
  raw.verbs_gid_index = 0;
  const auto choice = choose_rails(verbs, Options::from(raw), Topology(recorded.tree.root()));
  CHECK_EQ(choice.rails.size(), 1u);
  CHECK_EQ(choice.rails[0].name(), "rxe1:1");
  CHECK_EQ(choice.rails[0].gid().index, 0u);
  raw.ip_family = 6;
  raw.verbs_gid_index = -1;
  CHECK_EQ(choose_rails(verbs, Options::from(raw), Topology(recorded.tree.root())).rails.at(0).gid().text(),
           "fe80::5054:ff:fe00:1");
}

TEST(an_address_that_went_away_is_noticed) {
  RecordedHost recorded;
  add_soft_roce(recorded);
  const Verbs verbs = table();
  const Rail rail = choose_rails(read_devices(verbs, Topology(recorded.tree.root())), {}).rails.at(0);
  const auto context = VerbsContext::open(verbs, "rxe0");
  CHECK_EQ(why_stale(*context, rail), "");
  auto& gids = recorded.cards[0]->ports[0].gids;
  add_gid(recorded.cards[0]->ports[0], 1, "::ffff:10.9.77.1", IBV_GID_TYPE_ROCE_V2);  // another address took its place
  CHECK_EQ(why_stale(*context, rail), "entry 1 of the GID table of rxe0:1 is no longer ::ffff:10.9.0.1");
  gids.erase(1);
  CHECK(contains(why_stale(*context, rail), "entry 1"));
}

// --- the document

TEST(the_document_holds_cards_rails_and_what_is_near) {
  RecordedHost recorded;
  add_mlx5(recorded);
  const Verbs verbs = table();
  const Topology topology(recorded.tree.root());
  const auto devices = read_devices(verbs, topology);
  const std::string document = describe_choice(devices, choose_rails(devices, {}), topology);
  for (const char* part :
       {R"("built": true)", R"("problem": "")", R"("name": "mlx5_0", "driver": "mlx5_core")", R"("gbits": 800)",
        R"("gid_index": 5, "gid": "::ffff:10.0.0.5")", R"("max_mr_size": 18446744073709551615)",
        R"({"kind": "NVIDIA GPU", "name": "0000:1b:00.0", "rails": [{"rail": "mlx5_0:1", "distance": "same switch"}]})",
        R"({"kind": "memory", "name": "node 3", "rails": [{"rail": "mlx5_0:1", "distance": "other socket"}]})"})
    CHECK(contains(document, part));
}

TEST(odd_characters_do_not_break_the_document) {
  RecordedHost recorded;
  recorded.add("a\"b\\c\n").open_error = EIO;
  const Verbs verbs = table();
  const Topology topology(recorded.tree.root());
  const auto devices = read_devices(verbs, topology);
  CHECK(contains(describe_choice(devices, choose_rails(devices, {}), topology), R"("name": "a\"b\\c\u000a")"));
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
