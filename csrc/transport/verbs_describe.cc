#include "verbs_describe.h"

#include "../base/json.h"
#include "verbs_devices.h"

namespace mr {
namespace {

using namespace json;

// --- cards

Json of_entry(const GidFacts& entry) {
  return object({{"index", std::to_string(entry.gid.index)},
                 {"gid", quoted(entry.gid.text())},
                 {"type", quoted(gid_type_name(entry.type))},
                 {"interface", quoted(entry.netdev)},
                 {"up", truth(entry.netdev_up)}});
}

const PortVerdict* verdict_of(const RailChoice& choice, const std::string& device, uint32_t port) {
  for (const auto& verdict : choice.verdicts)
    if (verdict.device == device && (verdict.port == port || verdict.port == 0)) return &verdict;
  return nullptr;
}

Json of_port(const DeviceFacts& device, const PortFacts& port, const RailChoice& choice) {
  const PortVerdict* verdict = verdict_of(choice, device.name, port.number);
  const bool used = verdict != nullptr && verdict->used;
  return object({{"port", std::to_string(port.number)},
                 {"state", quoted(port_state_name(port.state))},
                 {"link_layer", quoted(link_layer_name(port.layer))},
                 {"lid", std::to_string(port.lid)},
                 {"mtu", std::to_string(port.mtu)},
                 {"gbits", figure(port.gbits)},
                 {"used", truth(used)},
                 {"left_out", truth(verdict != nullptr && verdict->left_out)},
                 {"reason", quoted(verdict == nullptr ? "" : verdict->reason)},
                 {"gids", array(port.gids, of_entry)}});
}

Json of_device(const DeviceFacts& device, const RailChoice& choice) {
  static const char* const transports[] = {"RC", "iWARP", "other"};
  const PortVerdict* whole = verdict_of(choice, device.name, 0);
  return object({{"name", quoted(device.name)},
                 {"driver", quoted(device.driver)},
                 {"firmware", quoted(device.firmware)},
                 {"transport", quoted(transports[static_cast<int>(device.transport)])},
                 {"pci", quoted(device.place.address())},
                 {"numa", std::to_string(device.place.numa)},
                 {"max_mr_size", std::to_string(device.max_mr_size)},
                 {"max_qp", std::to_string(device.max_qp)},
                 {"max_sge", std::to_string(device.max_sge)},
                 {"max_rd_atomic", std::to_string(device.max_rd_atomic)},
                 {"atomics", truth(device.atomics)},
                 {"on_demand_paging", truth(device.on_demand_paging)},
                 {"memory_windows", truth(device.memory_windows)},
                 {"problem", quoted(!device.problem.empty() || whole == nullptr ? device.problem : whole->reason)},
                 {"ports", array(device.ports, [&](const PortFacts& port) { return of_port(device, port, choice); })}});
}

Json of_rail(const Rail& rail) {
  return object({{"name", quoted(rail.name())},
                 {"device", quoted(rail.device)},
                 {"port", std::to_string(rail.port)},
                 {"group", std::to_string(rail.group)},
                 {"link_layer", quoted(link_layer_name(rail.layer))},
                 {"gid_index", std::to_string(rail.gid().index)},
                 {"gid", quoted(rail.gid().text())},
                 {"lid", std::to_string(rail.lid)},
                 {"mtu", std::to_string(rail.mtu)},
                 {"gbits", figure(rail.gbits)}});
}

// --- what the rails are near to

struct Spot {
  std::string kind, name;
  Place place;
};

std::vector<Spot> find_spots(const Topology& topology) {
  std::vector<Spot> spots;
  for (const int node : topology.nodes()) spots.push_back({"memory", "node " + std::to_string(node), {{}, node}});
  for (const auto& address : topology.list("bus/pci/devices")) {
    const std::string folder = "bus/pci/devices/" + address;
    const std::string vendor = topology.read(folder + "/vendor"), kind = topology.read(folder + "/class");
    const bool computes = kind.starts_with("0x03") || kind.starts_with("0x12");  // display, processing accelerator
    if (computes && (vendor == "0x10de" || vendor == "0x1002"))
      spots.push_back({vendor == "0x10de" ? "NVIDIA GPU" : "AMD GPU", address, topology.of_pci(address)});
  }
  return spots;
}

Json of_spot(const Spot& spot, const RailChoice& choice, const Topology& topology) {
  const auto distance = [&](const Rail& rail) {
    return object(
        {{"rail", quoted(rail.name())}, {"distance", quoted(distance_name(topology.between(rail.place, spot.place)))}});
  };
  return object({{"kind", quoted(spot.kind)}, {"name", quoted(spot.name)}, {"rails", array(choice.rails, distance)}});
}

}  // namespace

std::string describe_choice(const std::vector<DeviceFacts>& devices, const RailChoice& choice,
                            const Topology& topology) {
  return object(
      {{"built", truth(true)},
       {"problem", quoted(choice.why_none())},
       {"devices", array(devices, [&](const DeviceFacts& device) { return of_device(device, choice); })},
       {"rails", array(choice.rails, of_rail)},
       {"near", array(find_spots(topology), [&](const Spot& spot) { return of_spot(spot, choice, topology); })}});
}

std::string describe_nothing(const std::string& why) {
  RailChoice none;
  none.status = fail(MR_CONFIG, why);
  return describe_choice({}, none, Topology());
}

std::string describe_verbs(const RailOptions& options) {
  std::string why;
  const Verbs* const verbs = Verbs::installed(&why);
  if (verbs == nullptr) return describe_nothing("libibverbs cannot be used: " + why);
  try {
    const Topology topology;
    const auto devices = read_devices(*verbs, topology);
    return describe_choice(devices, choose_rails(devices, options), topology);
  } catch (const Error& failure) {
    return describe_nothing(failure.status().text);
  }
}

}  // namespace mr
