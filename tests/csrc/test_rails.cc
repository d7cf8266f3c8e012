// Which ports become rails, by which address, and who talks to whom: on the facts of recorded hosts.
#include "transport/rails.h"

#include <algorithm>

#include <arpa/inet.h>

#include "check.h"
#include "sysfs_tree.h"

using namespace mr;

namespace {

Gid gid(uint32_t index, const std::string& text) {
  Gid out;
  out.index = index;
  if (::inet_pton(AF_INET6, text.c_str(), out.bytes.data()) != 1) throw std::runtime_error("not an address: " + text);
  return out;
}

// Each address twice, as cards list them: for RoCE v1, then for RoCE v2.
std::vector<GidFacts> roce_table(const std::string& netdev, std::vector<std::string> addresses) {
  std::vector<GidFacts> out;
  for (const auto& address : addresses)
    for (const GidType type : {GidType::roce_v1, GidType::roce_v2})
      out.push_back({gid(static_cast<uint32_t>(out.size()), address), type, netdev, true});
  return out;
}

PortFacts roce(std::vector<GidFacts> gids, double gbits = 400) {
  PortFacts port;
  port.state = 4;
  port.layer = LinkLayer::ethernet;
  port.mtu = 4096;
  port.gbits = gbits;
  port.gids = std::move(gids);
  return port;
}

PortFacts infiniband(uint16_t lid, const std::string& guid, const std::string& prefix = "fe80::") {
  PortFacts port;
  port.state = 4;
  port.layer = LinkLayer::infiniband;
  port.lid = lid;
  port.mtu = 4096;
  port.gbits = 400;
  port.gids = {{gid(0, prefix + guid), GidType::infiniband, "", true}};
  return port;
}

DeviceFacts card(const std::string& name, const std::string& address, int numa, PortFacts port,
                 const std::string& driver = "mlx5_core") {
  DeviceFacts device;
  device.name = name;
  device.driver = driver;
  if (!address.empty()) device.place.pci = {"pci" + address.substr(0, 7), address};
  device.place.numa = numa;
  device.ports = {std::move(port)};
  return device;
}

RailChoice choose(const std::vector<DeviceFacts>& devices, RailOptions options = {}) {
  return choose_rails(devices, options);
}

const PortVerdict& verdict(const RailChoice& choice, const std::string& device, uint32_t port = 1) {
  for (const auto& one : choice.verdicts)
    if (one.device == device && (one.port == port || one.port == 0)) return one;
  throw std::runtime_error("no verdict about " + device);
}

std::string names(const RailChoice& choice) {
  std::string out;
  for (const auto& rail : choice.rails)
    out += (out.empty() ? "" : " ") + rail.name() + "=" + std::to_string(rail.group);
  return out;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// One card whose table holds these; what is chosen.
Rail only(std::vector<GidFacts> gids, RailOptions options = {}) {
  DeviceFacts device = card("mlx5_0", "0000:1a:00.0", 0, roce(std::move(gids)));
  device.netdevs = {"eth0"};
  const RailChoice choice = choose({device}, options);
  if (choice.rails.size() != 1) throw std::runtime_error("no rail: " + choice.why_none());
  return choice.rails[0];
}

}  // namespace

// --- GIDs

TEST(kinds_of_addresses) {
  CHECK_EQ(gid(0, "::ffff:10.9.0.1").scope(), GidScope::global);
  CHECK_EQ(gid(0, "fe80::5054:ff:fe00:1").scope(), GidScope::link_local);
  CHECK_EQ(gid(0, "::ffff:169.254.3.4").scope(), GidScope::link_local);
  CHECK_EQ(gid(0, "2001:db8::7").scope(), GidScope::global);
  CHECK_EQ(gid(0, "fd00:12::7").scope(), GidScope::global);
  for (const char* none : {"::", "::1", "::ffff:127.0.0.1", "::ffff:0.0.0.0", "::ffff:224.0.0.1", "ff02::1"})
    CHECK_EQ(gid(0, none).scope(), GidScope::unusable);
  CHECK(gid(0, "::ffff:10.9.0.1").is_ipv4() && !gid(0, "fe80::ffff:a09:1").is_ipv4());
  CHECK_EQ(gid(0, "::ffff:10.9.0.1").text(), "::ffff:10.9.0.1");
}

TEST(roce_v2_before_v1_and_routable_before_link_local) {
  const Rail rail = only(roce_table("eth0", {"fe80::5054:ff:fe00:1", "::ffff:10.9.0.1"}));
  CHECK_EQ(rail.gid().index, 3u);
  CHECK_EQ(rail.gid().text(), "::ffff:10.9.0.1");
  CHECK_EQ(rail.gids.size(), 2u);
  CHECK_EQ(rail.gids[1].index, 1u);  // the link-local one, for a peer that has no other
}

TEST(the_order_of_the_table_does_not_matter) {
  auto table = roce_table("eth0", {"fe80::1", "2001:db8::7", "::ffff:10.9.0.1", "::ffff:169.254.1.1"});
  std::sort(table.begin(), table.end(), [](const auto& a, const auto& b) { return a.gid.text() < b.gid.text(); });
  do {
    const Rail rail = only(table);
    CHECK_EQ(rail.gid().text(), "::ffff:10.9.0.1");
    CHECK_EQ(rail.gids[1].text(), "2001:db8::7");
  } while (std::next_permutation(table.begin(), table.end(),
                                 [](const auto& a, const auto& b) { return a.gid.index < b.gid.index; }) &&
           table.front().gid.index < 2);
}

TEST(the_cards_own_interface_before_those_on_top_of_it) {
  auto table = roce_table("eth0.100", {"::ffff:192.168.100.1"});
  for (auto entry : roce_table("eth0", {"::ffff:10.9.0.1"})) {
    entry.gid.index += 2;
    table.push_back(entry);
  }
  CHECK_EQ(only(table).gid().index, 3u);
}

TEST(a_bond_owns_the_addresses_of_its_card) {
  CHECK_EQ(only(roce_table("bond0", {"fe80::1", "::ffff:10.9.0.1"})).gid().index, 3u);
}

TEST(ip_family_is_kept) {
  const auto table = roce_table("eth0", {"fe80::1", "::ffff:10.9.0.1", "2001:db8::7"});
  CHECK_EQ(only(table, {"", -1, 4}).gids.size(), 1u);
  CHECK_EQ(only(table, {"", -1, 6}).gid().text(), "2001:db8::7");
  const auto choice = choose({card("mlx5_0", "", 0, roce(roce_table("eth0", {"::ffff:10.9.0.1"})))}, {"", -1, 6});
  CHECK(choice.rails.empty());
  CHECK(contains(choice.why_none(), "no IPv6 GID, which option ip_family asks for"));
}

TEST(an_interface_that_is_down_is_not_used) {
  auto table = roce_table("eth0", {"::ffff:10.9.0.1"});
  for (auto& entry : table) entry.netdev_up = false;
  const auto choice = choose({card("mlx5_0", "", 0, roce(table))});
  CHECK(choice.rails.empty());
  CHECK(contains(choice.why_none(), "eth0 is down"));
}

TEST(what_is_missing_in_a_table_is_told) {
  auto v1 = roce_table("eth0", {"::ffff:10.9.0.1"});
  v1.pop_back();
  for (const auto& [table, why] : {std::pair{std::vector<GidFacts>{}, "its GID table is empty"},
                                   {v1, "no RoCE v2 GID"},
                                   {roce_table("lo", {"::1", "::ffff:127.0.0.1"}), "reached from another host"}}) {
    const auto choice = choose({card("mlx5_0", "", 0, roce(table))});
    CHECK(choice.rails.empty() && choice.status.ok());
    CHECK(contains(choice.why_none(), why));
  }
}

TEST(only_link_local_is_used_and_said) {
  const auto choice = choose({card("mlx5_0", "", 0, roce(roce_table("eth0", {"fe80::1"})))});
  CHECK_EQ(choice.rails.size(), 1u);
  CHECK(contains(choice.verdicts[0].reason, "one Ethernet segment only"));
}

TEST(an_entry_can_be_asked_for) {
  const auto table = roce_table("eth0", {"fe80::1", "::ffff:10.9.0.1"});
  CHECK_EQ(only(table, {"", 1, 0}).gid().text(), "fe80::1");
  CHECK_EQ(only(table, {"", 2, 0}).gids.size(), 1u);  // RoCE v1, asked for
  const auto choice = choose({card("mlx5_0", "", 0, roce(table))}, {"", 9, 0});
  CHECK(choice.rails.empty());
  CHECK_EQ(choice.status.kind, MR_CONFIG);
  CHECK(contains(choice.status.text, "verbs_gid_index = 9"));
  CHECK(contains(choice.verdicts[0].reason, "that entry of its GID table is empty"));
}

TEST(both_ends_of_a_connection_speak_one_family) {
  const Gid v4 = gid(3, "::ffff:10.9.0.1"), v6 = gid(5, "2001:db8::7"), local = gid(1, "fe80::1");
  const Gid their_v6 = gid(7, "2001:db8::9"), their_local = gid(1, "fe80::2");
  const auto pair = pair_gids({v4, v6, local}, {their_v6, their_local});
  CHECK(pair && pair->ours.index == 5 && pair->theirs.index == 7);
  CHECK_EQ(pair_gids({v4, v6, local}, {their_local})->theirs.text(), "fe80::2");
  CHECK(!pair_gids({v4}, {their_v6, their_local}));
  CHECK(!pair_gids({}, {their_v6}));
}

// --- hosts

TEST(eight_infiniband_cards_and_two_slow_ethernet_ports) {
  // Named by the kernel in the order in which the driver came up; the slots give the order of rails.
  const char* slots[] = {"0000:4f:00.0", "0000:1a:00.0", "0000:40:00.0", "0000:9c:00.0",
                         "0000:bc:00.0", "0000:ce:00.0", "0000:dc:00.0", "0000:5e:00.0"};
  std::vector<DeviceFacts> devices;
  for (int i = 0; i < 8; ++i)
    devices.push_back(
        card("mlx5_" + std::to_string(i), slots[i], i / 4, infiniband(static_cast<uint16_t>(i + 1), "1")));
  devices.push_back(card("mlx5_8", "0000:29:00.0", 0, roce(roce_table("eno1", {"::ffff:10.0.0.4"}), 100)));
  devices.push_back(card("mlx5_9", "0000:29:00.1", 0, roce(roce_table("eno2", {"::ffff:10.0.1.4"}), 100)));
  const auto choice = choose(devices);
  CHECK_EQ(names(choice), "mlx5_1:1=0 mlx5_2:1=1 mlx5_0:1=2 mlx5_7:1=3 mlx5_3:1=4 mlx5_4:1=5 mlx5_5:1=6 mlx5_6:1=7");
  CHECK(contains(verdict(choice, "mlx5_8").reason, "100 Gb/s beside 400 Gb/s"));
  CHECK(verdict(choice, "mlx5_8").left_out);
  CHECK_EQ(verdict(choice, "mlx5_0").reason, "LID 1");
}

TEST(a_rail_that_is_down_leaves_the_numbers_of_the_others) {
  std::vector<DeviceFacts> devices;
  for (int i = 0; i < 4; ++i)
    devices.push_back(card("bnxt_re" + std::to_string(i), "0000:0" + std::to_string(i + 1) + ":00.0", 0,
                           roce(roce_table("eth" + std::to_string(i), {"::ffff:10.9." + std::to_string(i) + ".1"})),
                           "bnxt_en"));
  devices[1].ports[0].state = 1;
  const auto choice = choose(devices);
  CHECK_EQ(names(choice), "bnxt_re0:1=0 bnxt_re2:1=2 bnxt_re3:1=3");
  CHECK(contains(verdict(choice, "bnxt_re1").reason, "the port is DOWN"));
  CHECK(!verdict(choice, "bnxt_re1").left_out);
}

TEST(soft_roce_rails_in_natural_order) {
  std::vector<DeviceFacts> devices;
  for (const char* name : {"rxe10", "rxe2", "rxe1"})
    devices.push_back(card(name, "", -1, roce(roce_table("eth0", {"::ffff:10.9.0.1"}), 2.5), ""));
  CHECK_EQ(names(choose(devices)), "rxe1:1=0 rxe2:1=1 rxe10:1=2");
}

TEST(ionic_beside_iwarp_and_efa) {
  DeviceFacts iwarp = card("irdma0", "0000:31:00.0", 0, roce({}), "ice");
  iwarp.transport = Transport::iwarp;
  DeviceFacts efa = card("rdmap0s6", "0000:00:06.0", 0, roce({}), "efa");
  efa.transport = Transport::other;
  DeviceFacts usnic = card("usnic_0", "0000:07:00.0", 0, roce({}), "enic");
  usnic.transport = Transport::other;
  const auto choice = choose(
      {iwarp, efa, usnic, card("ionic_0", "0000:06:00.0", 0, roce(roce_table("ens6", {"::ffff:10.1.0.1"})), "ionic")});
  CHECK_EQ(names(choice), "ionic_0:1=0");
  CHECK_EQ(verdict(choice, "irdma0").reason, "iWARP: no RC without rdma_cm, so it goes over tcp");
  CHECK_EQ(verdict(choice, "rdmap0s6").reason, "EFA: no RC, so it goes over tcp");
  CHECK_EQ(verdict(choice, "usnic_0").reason, "no RC, so it goes over tcp");
  CHECK(contains(choose({iwarp, efa}).why_none(), "irdma0: iWARP"));
}

TEST(irdma_in_roce_mode_is_a_rail) {
  CHECK_EQ(
      names(choose({card("rocep49s0", "0000:31:00.0", 0, roce(roce_table("ens1", {"::ffff:10.1.0.1"}), 100), "ice")})),
      "rocep49s0:1=0");
}

TEST(a_card_with_two_ports_of_different_kinds) {
  DeviceFacts vpi = card("mlx5_0", "0000:1a:00.0", 0, infiniband(7, "1"));
  vpi.ports.push_back(roce(roce_table("eth0", {"::ffff:10.9.0.1"})));
  vpi.ports.back().number = 2;
  const auto choice = choose({vpi});
  CHECK_EQ(names(choice), "mlx5_0:1=0 mlx5_0:2=0");  // each the first of its kind
}

TEST(infiniband_without_a_subnet_manager) {
  PortFacts init = infiniband(0, "1"), no_lid = infiniband(0, "1");
  init.state = 2;
  for (const auto& port : {init, no_lid}) {
    const auto choice = choose({card("mlx5_0", "", 0, port)});
    CHECK(choice.rails.empty());
    CHECK(contains(choice.why_none(), "no subnet manager"));
  }
}

TEST(a_card_that_cannot_be_opened_is_told) {
  DeviceFacts closed = card("mlx5_0", "", 0, roce({}));
  closed.problem = "/dev/infiniband/uverbs0 cannot be opened: Permission denied";
  CHECK(contains(choose({closed}).why_none(), "mlx5_0: /dev/infiniband/uverbs0 cannot be opened"));
  CHECK_EQ(choose({}).why_none(), "no RDMA card");
}

// --- option verbs_devices

TEST(named_cards_in_the_order_of_their_names) {
  std::vector<DeviceFacts> devices;
  for (int i = 0; i < 4; ++i)
    devices.push_back(card("mlx5_" + std::to_string(i), "0000:0" + std::to_string(i + 1) + ":00.0", 0,
                           roce(roce_table("eth", {"::ffff:10.9.0.1"}), i == 3 ? 25 : 400)));
  CHECK_EQ(names(choose(devices, {"mlx5_3,mlx5_1", -1, 0})), "mlx5_3:1=0 mlx5_1:1=1");
  CHECK_EQ(names(choose(devices, {"mlx5_2:1,mlx5_*", -1, 0})), "mlx5_2:1=0 mlx5_0:1=1 mlx5_1:1=2 mlx5_3:1=3");
  const auto two = choose(devices, {"mlx5_1", -1, 0});
  CHECK(contains(verdict(two, "mlx5_0").reason, "left out by option verbs_devices = mlx5_1"));
  const auto wrong = choose(devices, {"mlx5_1,mlx6_0", -1, 0});
  CHECK(wrong.rails.empty());
  CHECK_EQ(wrong.status.kind, MR_CONFIG);
  CHECK(contains(wrong.status.text, "there is no mlx6_0; here are mlx5_0, mlx5_1"));
  CHECK_EQ(choose(devices, {"mlx5_1:2", -1, 0}).status.kind, MR_CONFIG);
  CHECK(choose({}, {"mlx5_1", -1, 0}).status.ok());  // a host without cards has other lanes
}

// --- who talks to whom

RailFace face(uint32_t group, const std::string& address) {
  return {group, LinkLayer::ethernet, 0, {gid(3, address)}, false};
}

std::vector<int> partners(const std::vector<RailFace>& ours, const std::vector<RailFace>& theirs) {
  std::vector<int> out;
  for (const auto& pair : pair_rails(ours, theirs)) out.push_back(pair ? static_cast<int>(pair->theirs) : -1);
  return out;
}

TEST(rail_k_talks_to_rail_k) {
  const auto a = face(0, "::ffff:10.0.0.1"), b = face(1, "::ffff:10.0.1.1"), c = face(2, "::ffff:10.0.2.1");
  CHECK(partners({a, b, c}, {c, a, b}) == std::vector<int>({1, 2, 0}));
  CHECK(pair_rails({a}, {b})[0]->grh);  // RoCE always has a global header
}

TEST(a_rail_that_the_peer_lacks_shares_another) {
  const auto a = face(0, "::ffff:10.0.0.1"), b = face(1, "::ffff:10.0.1.1"), c = face(2, "::ffff:10.0.2.1");
  CHECK(partners({a, b, c}, {a, c}) == std::vector<int>({0, 0, 1}));
  CHECK(partners({a, b, c}, {c}) == std::vector<int>({0, 0, 0}));
  CHECK(partners({b}, {a, c}) == std::vector<int>({0}));
  CHECK(partners({a, b}, {}) == std::vector<int>({-1, -1}));
}

TEST(kinds_of_links_do_not_mix) {
  const auto six = face(0, "2001:db8::7"), four = face(0, "::ffff:10.0.0.1");
  const RailFace ib{0, LinkLayer::infiniband, 9, {gid(0, "fe80::1")}, false};
  CHECK(partners({six, ib}, {four}) == std::vector<int>({-1, -1}));
  CHECK(partners({four, ib}, {ib, four}) == std::vector<int>({1, 0}));
}

TEST(infiniband_needs_a_global_header_between_subnets_only) {
  const auto at = [](uint32_t group, const std::string& address) {
    return RailFace{group, LinkLayer::infiniband, 9, {gid(0, address)}, false};
  };
  const auto here = at(0, "fe80::1"), there = at(0, "fe80::2"), far = at(5, "fec0:0:0:1::2");
  CHECK(!pair_rails({here}, {there})[0]->grh);
  CHECK(pair_rails({here}, {far})[0]->grh);
  CHECK(partners({at(7, "fe80::3")}, {far, there}) == std::vector<int>({1}));  // the own subnet first
  RailFace strict = there;
  strict.grh_required = true;
  CHECK(pair_rails({here}, {strict})[0]->grh);
}

TEST(the_nearest_rails_of_a_gpu_and_of_memory) {
  mr::test::SysfsTree tree;
  two_socket_host(tree);
  const Topology topology(tree.root());
  const auto order = [&](const Place& place) {
    std::vector<Rail> rails(3);
    for (size_t i = 0; i < 3; ++i) {
      rails[i].group = static_cast<uint32_t>(i);
      rails[i].place = topology.of_pci(std::vector{"0000:1a:00.0", "0000:38:00.0", "0000:aa:00.0"}[i]);
    }
    sort_by_distance(rails, place, topology);
    return std::vector<uint32_t>{rails[0].group, rails[1].group, rails[2].group};
  };
  using Groups = std::vector<uint32_t>;
  CHECK(order(topology.of_pci("0000:1b:00.0")) == Groups({0, 1, 2}));  // a GPU
  CHECK(order(topology.of_pci("0000:ac:00.0")) == Groups({2, 0, 1}));
  CHECK(order(Place{{}, 1}) == Groups({1, 0, 2}));  // memory
  CHECK(order(Place{{}, 3}) == Groups({2, 0, 1}));
  CHECK(order(Place{}) == Groups({0, 1, 2}));  // not known
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
