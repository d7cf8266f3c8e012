#include "rails.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include <fnmatch.h>
#include "../base/list.h"

namespace mr {
namespace {

constexpr int kActive = 4;     // IBV_PORT_ACTIVE
constexpr int kInit = 2;       // IBV_PORT_INIT
constexpr double kSlow = 0.5;  // of the fastest: a slower port would hold up what is striped over it

// Position of the first pattern ("mlx5_0", "mlx5_0:1", "mlx5_*") for the port; the number of patterns where none is.
size_t place_in_list(const std::vector<std::string>& patterns, const std::string& device, uint32_t port) {
  const std::string exact = device + ":" + std::to_string(port);
  for (size_t i = 0; i < patterns.size(); ++i) {
    const std::string& name = patterns[i].find(':') == std::string::npos ? device : exact;
    if (::fnmatch(patterns[i].c_str(), name.c_str(), 0) == 0) return i;
  }
  return patterns.size();
}

struct Candidate {
  const DeviceFacts* device;
  const PortFacts* port;
  size_t pattern;  // place in option verbs_devices
  Rail rail;
  std::string reason;
  bool usable = false;
  bool left_out = false;
  bool lacks_entry = false;  // that option verbs_gid_index names

  // Cards in the order of their slots, which is the same on hosts that are built alike whatever the cards are called.
  auto order() const {
    const std::string address = device->place.address();
    return std::make_tuple(pattern, address.empty(), address, device->name.size(), device->name, port->number);
  }
};

std::string why_not_reliable(const DeviceFacts& device) {
  if (device.transport == Transport::iwarp) return "iWARP: no RC without rdma_cm, so it goes over tcp";
  if (device.driver == "efa") return "EFA: no RC, so it goes over tcp";
  return "no RC, so it goes over tcp";
}

// "" where the port itself can be used.
std::string why_not_active(const PortFacts& port) {
  if (!port.problem.empty()) return port.problem;
  if (port.layer == LinkLayer::unspecified) return "its link layer is neither InfiniBand nor Ethernet";
  if (port.layer == LinkLayer::infiniband && (port.state == kInit || (port.state == kActive && port.lid == 0)))
    return std::string("the port is ") + port_state_name(port.state) + ": no subnet manager has given it a LID";
  if (port.state != kActive) return std::string("the port is ") + port_state_name(port.state);
  return "";
}

bool is_own(const DeviceFacts& device, const GidFacts& entry) {
  return std::find(device.netdevs.begin(), device.netdevs.end(), entry.netdev) != device.netdevs.end();
}

std::string of_interface(const GidFacts& entry) { return entry.netdev.empty() ? "" : " of " + entry.netdev; }

std::string why_no_gid(const PortFacts& port, const RailOptions& options) {
  bool any_v2 = false, any_address = false;
  std::string down;
  for (const auto& entry : port.gids) {
    if (entry.type != GidType::roce_v2) continue;
    any_v2 = true;
    if (entry.gid.scope() == GidScope::unusable) continue;
    any_address = true;
    if (!entry.netdev_up) down = entry.netdev;
  }
  if (port.gids.empty()) return "its GID table is empty: bring its interface up and give it an IP address";
  if (!any_v2) return "it has no RoCE v2 GID, only RoCE v1";
  if (!any_address) return "no GID of it can be reached from another host";
  if (!down.empty()) return "its interface " + down + " is down";
  return "it has no IPv" + std::to_string(options.ip_family) + " GID, which option ip_family asks for";
}

// Best first; one for each kind of address, for the peer may lack a kind.
std::vector<GidFacts> rank_gids(const DeviceFacts& device, const PortFacts& port, const RailOptions& options) {
  std::vector<GidFacts> ranked;
  for (const auto& entry : port.gids) {
    if (entry.type != GidType::roce_v2 || !entry.netdev_up || entry.gid.scope() == GidScope::unusable) continue;
    if (options.ip_family != 0 && entry.gid.is_ipv4() != (options.ip_family == 4)) continue;
    ranked.push_back(entry);
  }
  const auto rank = [&](const GidFacts& entry) {
    return std::make_tuple(entry.gid.scope(), !is_own(device, entry), !entry.gid.is_ipv4(), entry.gid.index);
  };
  std::sort(ranked.begin(), ranked.end(), [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  std::vector<GidFacts> best;
  for (const auto& entry : ranked)
    if (std::none_of(best.begin(), best.end(), [&](const auto& chosen) {
          return chosen.gid.is_ipv4() == entry.gid.is_ipv4() && chosen.gid.scope() == entry.gid.scope();
        }))
      best.push_back(entry);
  return best;
}

const GidFacts* find_gid(const PortFacts& port, uint32_t index) {
  const auto at = std::find_if(port.gids.begin(), port.gids.end(), [&](const auto& g) { return g.gid.index == index; });
  return at == port.gids.end() ? nullptr : &*at;
}

void use_infiniband(Candidate& one) {
  const GidFacts* entry = find_gid(*one.port, 0);
  if (entry == nullptr) {
    one.reason = "its GID table is empty";
    return;
  }
  one.usable = true;
  one.rail.gids = {entry->gid};
  one.reason = "LID " + std::to_string(one.port->lid);
}

void use_chosen_entry(Candidate& one, const RailOptions& options) {
  const GidFacts* entry = find_gid(*one.port, static_cast<uint32_t>(options.gid_index));
  const std::string option = "option verbs_gid_index = " + std::to_string(options.gid_index);
  if (entry == nullptr || entry->gid.scope() == GidScope::unusable) {
    one.lacks_entry = true;
    one.reason = option + ": that entry of its GID table " + (entry == nullptr ? "is empty" : "is no address to reach");
    return;
  }
  one.usable = true;
  one.rail.gids = {entry->gid};
  one.reason = option + ": " + entry->gid.text() + ", " + gid_type_name(entry->type) + of_interface(*entry);
}

void use_best_entry(Candidate& one, const RailOptions& options) {
  const auto ranked = rank_gids(*one.device, *one.port, options);
  if (ranked.empty()) {
    one.reason = why_no_gid(*one.port, options);
    return;
  }
  one.usable = true;
  for (const auto& entry : ranked) one.rail.gids.push_back(entry.gid);
  const GidFacts& best = ranked.front();
  const bool local = best.gid.scope() == GidScope::link_local;
  one.reason = "GID " + std::to_string(best.gid.index) + " " + best.gid.text() + ", RoCE v2, " +
               (local                ? "link-local"
                : best.gid.is_ipv4() ? "IPv4"
                                     : "global IPv6") +
               of_interface(best);
  if (local) one.reason += "; it reaches one Ethernet segment only: give the interface an IP address";
}

void judge(Candidate& one, const RailOptions& options) {
  const DeviceFacts& device = *one.device;
  const PortFacts& port = *one.port;
  one.rail.layer = port.layer;
  one.rail.lid = port.lid;
  one.rail.grh_required = port.grh_required;
  one.rail.device = device.name;
  one.rail.port = port.number;
  one.rail.mtu = port.mtu;
  one.rail.gbits = port.gbits;
  one.rail.software = device.driver.empty();
  one.rail.place = device.place;
  if (one.left_out) {
    one.reason = "left out by option verbs_devices = " + options.devices;
  } else if (!device.problem.empty()) {
    one.reason = device.problem;
  } else if (one.reason = why_not_active(port); !one.reason.empty()) {
    return;
  } else if (port.layer == LinkLayer::infiniband) {
    use_infiniband(one);
  } else if (options.gid_index >= 0) {
    use_chosen_entry(one, options);
  } else {
    use_best_entry(one, options);
  }
}

std::string in_gbits(double gbits) {
  char out[32];
  std::snprintf(out, sizeof out, "%g Gb/s", gbits);
  return out;
}

void drop_slow(std::vector<Candidate>& candidates) {
  double fastest = 0;
  for (const auto& one : candidates)
    if (one.usable) fastest = std::max(fastest, one.rail.gbits);
  for (auto& one : candidates) {
    if (!one.usable || one.rail.gbits == 0 || one.rail.gbits >= kSlow * fastest) continue;
    one.usable = false;
    one.left_out = true;
    one.reason = in_gbits(one.rail.gbits) + " beside " + in_gbits(fastest) +
                 ": it would hold up the others; option verbs_devices can name it";
  }
}

// Numbers every port that could be a rail, also one that is down now: so that rail 3 stays rail 3 when rail 2 fails.
void number_groups(std::vector<Candidate>& candidates, size_t patterns) {
  std::map<LinkLayer, uint32_t> next;
  for (auto& one : candidates)
    if (patterns == 0 || one.pattern < patterns) one.rail.group = next[one.rail.layer]++;
}

std::string names_of(const std::vector<DeviceFacts>& devices) {
  std::string names;
  for (const auto& device : devices) names += (names.empty() ? "" : ", ") + device.name;
  return names;
}

Status check_patterns(const std::vector<DeviceFacts>& devices, const std::vector<std::string>& patterns,
                      const RailOptions& options) {
  for (const auto& pattern : patterns) {
    const bool found = std::any_of(devices.begin(), devices.end(), [&](const DeviceFacts& device) {
      return std::any_of(device.ports.begin(), device.ports.end(), [&](const PortFacts& port) {
        return place_in_list({pattern}, device.name, port.number) == 0;
      });
    });
    if (!found && !devices.empty())
      return fail(MR_CONFIG, "option verbs_devices = " + options.devices + ": there is no " + pattern + "; here are " +
                                 names_of(devices));
  }
  return {};
}

}  // namespace

const char* link_layer_name(LinkLayer layer) {
  return layer == LinkLayer::infiniband ? "InfiniBand" : layer == LinkLayer::ethernet ? "Ethernet" : "unspecified";
}

const char* gid_type_name(GidType type) {
  return type == GidType::roce_v2 ? "RoCE v2" : type == GidType::roce_v1 ? "RoCE v1" : "InfiniBand";
}

const char* port_state_name(int state) {
  static const char* const names[] = {"without state", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"};
  return state >= 0 && state < 6 ? names[state] : "in an unknown state";
}

std::string RailChoice::why_none() const {
  if (!rails.empty()) return "";
  if (!status.ok()) return status.text;
  if (verdicts.empty()) return "no RDMA card";
  std::string why;
  for (const auto& verdict : verdicts) why += (why.empty() ? "" : "; ") + verdict.device + ": " + verdict.reason;
  return why;
}

RailChoice choose_rails(const std::vector<DeviceFacts>& devices, const RailOptions& options) {
  RailChoice choice;
  const auto patterns = split_list(options.devices);
  std::vector<Candidate> candidates;
  for (const auto& device : devices) {
    if (device.transport != Transport::reliable) {
      choice.verdicts.push_back({device.name, 0, false, why_not_reliable(device), true});
      continue;
    }
    if (device.ports.empty())
      choice.verdicts.push_back(
          {device.name, 0, false, device.problem.empty() ? "it has no port" : device.problem, false});
    for (const auto& port : device.ports) {
      const size_t pattern = place_in_list(patterns, device.name, port.number);
      candidates.push_back({&device, &port, pattern, {}, {}, false, pattern == patterns.size() && !patterns.empty()});
      judge(candidates.back(), options);
    }
  }
  std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.order() < b.order(); });
  number_groups(candidates, patterns.size());
  if (patterns.empty()) drop_slow(candidates);
  choice.status = check_patterns(devices, patterns, options);
  for (auto& one : candidates) {
    const bool used = one.usable && choice.status.ok();
    choice.verdicts.push_back({one.device->name, one.port->number, used, one.reason, one.left_out});
    if (used) choice.rails.push_back(std::move(one.rail));
  }
  const auto lacks_entry = [](const Candidate& one) { return one.lacks_entry; };
  if (choice.rails.empty() && choice.status.ok() && std::any_of(candidates.begin(), candidates.end(), lacks_entry))
    choice.status = fail(MR_CONFIG, "option verbs_gid_index = " + std::to_string(options.gid_index) +
                                        ": no port that is up has an address in that entry of its GID table");
  return choice;
}

namespace {

bool same_subnet(const Gid& a, const Gid& b) { return std::memcmp(a.bytes.data(), b.bytes.data(), 8) == 0; }

std::optional<RailPair> reach(const RailFace& our, const RailFace& their, size_t index) {
  if (our.layer != their.layer || our.gids.empty() || their.gids.empty()) return std::nullopt;
  RailPair pair{index, {our.gids.front(), their.gids.front()}, true};
  if (our.layer == LinkLayer::infiniband) {
    pair.grh = our.grh_required || their.grh_required || !same_subnet(pair.gids.ours, pair.gids.theirs);
    return pair;
  }
  const auto gids = pair_gids(our.gids, their.gids);
  if (!gids) return std::nullopt;
  pair.gids = *gids;
  return pair;
}

}  // namespace

std::vector<std::optional<RailPair>> pair_rails(const std::vector<RailFace>& ours,
                                                const std::vector<RailFace>& theirs) {
  std::vector<std::optional<RailPair>> pairs(ours.size());
  std::vector<size_t> taken(theirs.size(), 0);
  for (size_t i = 0; i < ours.size(); ++i)
    for (size_t k = 0; k < theirs.size() && !pairs[i]; ++k)
      if (ours[i].group == theirs[k].group && (pairs[i] = reach(ours[i], theirs[k], k))) ++taken[k];
  for (size_t i = 0; i < ours.size(); ++i) {
    if (pairs[i]) continue;
    // The peer has no such rail: share the one with the fewest, within one subnet if there is one.
    auto best = std::make_pair(true, SIZE_MAX);
    for (size_t k = 0; k < theirs.size(); ++k) {
      const auto pair = reach(ours[i], theirs[k], k);
      const bool routed = pair && ours[i].layer == LinkLayer::infiniband && pair->grh;
      if (pair && std::make_pair(routed, taken[k]) < best) best = {routed, taken[k]}, pairs[i] = pair;
    }
    if (pairs[i]) ++taken[pairs[i]->theirs];
  }
  return pairs;
}

void sort_by_distance(std::vector<Rail>& rails, const Place& place, const Topology& topology) {
  std::stable_sort(rails.begin(), rails.end(), [&](const Rail& a, const Rail& b) {
    return topology.between(a.place, place) < topology.between(b.place, place);
  });
}

}  // namespace mr
