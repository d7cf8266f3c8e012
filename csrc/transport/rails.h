// Which ports of which RDMA cards are used, and why not the others: decided on plain facts, so that it can be tested
// without a card. A rail is a port that is used. verbs_devices.h reads the facts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../base/error.h"
#include "gid.h"
#include "topology.h"

namespace mr {

enum class LinkLayer { unspecified, infiniband, ethernet };
enum class Transport { reliable, iwarp, other };  // reliable: has RC queue pairs that need no rdma_cm
enum class GidType { infiniband, roce_v1, roce_v2 };

const char* link_layer_name(LinkLayer layer);
const char* gid_type_name(GidType type);
const char* port_state_name(int state);

struct GidFacts {
  Gid gid;
  GidType type = GidType::infiniband;
  std::string netdev;  // interface whose address it is
  bool netdev_up = true;
};

struct PortFacts {
  uint32_t number = 1;
  int state = 0;  // enum ibv_port_state
  LinkLayer layer = LinkLayer::unspecified;
  uint16_t lid = 0;
  uint32_t mtu = 0;  // active, bytes
  double gbits = 0;  // per second
  bool grh_required = false;
  std::vector<GidFacts> gids;  // entries in use
  std::string problem;         // why it can't be used, as far as reading it told
};

struct DeviceFacts {
  std::string name, driver, firmware;
  Transport transport = Transport::reliable;
  Place place;
  std::vector<std::string> netdevs;  // the card's own interfaces, without VLANs and others on top of them
  std::vector<PortFacts> ports;
  std::string problem;  // why it can't be opened
  uint64_t max_mr_size = 0;
  uint32_t max_qp = 0, max_sge = 0, max_rd_atomic = 0;
  bool atomics = false, on_demand_paging = false, memory_windows = false;
};

struct RailOptions {
  std::string devices;  // option verbs_devices
  int gid_index = -1;   // option verbs_gid_index
  uint32_t ip_family = 0;
};

// What a peer is told about a rail.
struct RailFace {
  uint32_t group = 0;  // rail k of one host talks to rail k of another
  LinkLayer layer = LinkLayer::unspecified;
  uint16_t lid = 0;       // InfiniBand
  std::vector<Gid> gids;  // best first, never empty
  bool grh_required = false;
};

struct Rail : RailFace {
  std::string device;
  uint32_t port = 1;
  uint32_t mtu = 0;  // bytes
  double gbits = 0;
  bool software = false;  // no driver of a card is behind it, like Soft-RoCE
  Place place;

  std::string name() const { return device + ":" + std::to_string(port); }
  Gid gid() const { return gids.front(); }
};

struct PortVerdict {
  std::string device;
  uint32_t port = 0;  // 0: the whole device
  bool used = false;  // it is a rail
  std::string reason;
  bool left_out = false;  // nothing is wrong with it, but it is not wanted or has no RC
};

struct RailChoice {
  std::vector<Rail> rails;  // by group
  std::vector<PortVerdict> verdicts;
  Status status;  // MR_CONFIG where an option can't be honoured; then there are no rails

  std::string why_none() const;
};

RailChoice choose_rails(const std::vector<DeviceFacts>& devices, const RailOptions& options);

// For each of our rails the one of theirs that it talks to, and the addresses for it.
struct RailPair {
  size_t theirs = 0;
  GidPair gids;
  bool grh = false;  // packets need a global header
};
std::vector<std::optional<RailPair>> pair_rails(const std::vector<RailFace>& ours, const std::vector<RailFace>& theirs);

// Nearest to a place first; those as near as each other stay in their order.
void sort_by_distance(std::vector<Rail>& rails, const Place& place, const Topology& topology);

}  // namespace mr
