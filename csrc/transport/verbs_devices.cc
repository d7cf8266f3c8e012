#include "verbs_devices.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include <fcntl.h>
#include <net/if.h>
#include <unistd.h>

namespace mr {
namespace {

constexpr int kReachableEntries = 256;  // of a GID table: a queue pair's attributes have 8 bits for it

struct Listed {
  std::string name, file;
  Transport transport;
};

Transport transport_of(const ibv_device& device) {
  if (device.transport_type == IBV_TRANSPORT_IB) return Transport::reliable;
  return device.transport_type == IBV_TRANSPORT_IWARP ? Transport::iwarp : Transport::other;
}

std::vector<Listed> list_devices(const Verbs& verbs) {
  int count = 0;
  ibv_device** const list = verbs.get_device_list(&count);
  if (list == nullptr) {
    if (errno == ENOSYS) return {};  // a kernel without RDMA says it like this
    throw Error(verbs_failure(MR_RESOURCE_EXHAUSTED, "ibv_get_device_list", "all devices", errno));
  }
  std::vector<Listed> out;
  for (int i = 0; i < count; ++i)
    out.push_back(
        {verbs.get_device_name(list[i]), std::string("/dev/infiniband/") + list[i]->dev_name, transport_of(*list[i])});
  verbs.free_device_list(list);
  return out;
}

std::string folder_of(const std::string& device) { return "class/infiniband/" + device; }

std::string folder_of(const std::string& device, uint32_t port) {
  return folder_of(device) + "/ports/" + std::to_string(port);
}

// Of the card itself; of the interface below it where it is one of software.
void read_place(DeviceFacts& device, const Topology& topology) {
  const std::string folder = folder_of(device.name), parent = topology.read(folder + "/parent");
  device.netdevs = topology.list(folder + "/device/net");
  if (!parent.empty()) device.netdevs.push_back(parent);
  device.place = topology.of_device(parent.empty() ? folder + "/device" : "class/net/" + parent + "/device");
  std::error_code failed;
  const auto driver = std::filesystem::canonical(topology.sysfs() + "/" + folder + "/device/driver", failed);
  if (!failed) device.driver = driver.filename().string();
}

LinkLayer layer_of(const ibv_port_attr& attr) {
  if (attr.link_layer == IBV_LINK_LAYER_ETHERNET) return LinkLayer::ethernet;
  // Libraries from before RoCE leave it unspecified for InfiniBand.
  return attr.link_layer == IBV_LINK_LAYER_INFINIBAND || attr.link_layer == IBV_LINK_LAYER_UNSPECIFIED
             ? LinkLayer::infiniband
             : LinkLayer::unspecified;
}

LinkLayer layer_by_name(const std::string& name) {
  if (name == "InfiniBand") return LinkLayer::infiniband;
  return name == "Ethernet" ? LinkLayer::ethernet : LinkLayer::unspecified;
}

// The kernel's figure knows speeds that are newer than the header; without it, lanes times their speed.
double gbits_of(const std::string& rate, const ibv_port_attr& attr) {
  if (const double known = std::strtod(rate.c_str(), nullptr); known > 0) return known;
  const int lanes = attr.active_width == 2    ? 4
                    : attr.active_width == 4  ? 8
                    : attr.active_width == 8  ? 12
                    : attr.active_width == 16 ? 2
                                              : 1;
  switch (attr.active_speed) {
    case 1:
      return lanes * 2.5;
    case 2:
      return lanes * 5.0;
    case 4:
    case 8:
      return lanes * 10.0;
    case 16:
      return lanes * 14.0;
    case 32:
      return lanes * 25.0;
    case 64:
      return lanes * 50.0;
    case 128:
      return lanes * 100.0;
    default:
      return 0;
  }
}

struct PortReader {
  const VerbsContext& context;
  const Topology& topology;
  const uint32_t port;

  std::string attribute(const char* kind, uint32_t index) const {
    return topology.read(folder_of(context.name(), port) + "/gid_attrs/" + kind + "/" + std::to_string(index));
  }

  // False where the entry is empty or can't be read: then there is nothing to use.
  bool read_entry(uint32_t index, GidFacts& entry) const {
    entry.gid.index = index;
    const Verbs& verbs = context.verbs();
    ibv_gid_entry raw{};
    if (verbs.query_gid_ex != nullptr && verbs.query_gid_ex(context.get(), port, index, &raw) == 0) {
      std::memcpy(entry.gid.bytes.data(), raw.gid.raw, 16);
      entry.type = raw.gid_type == IBV_GID_TYPE_ROCE_V2   ? GidType::roce_v2
                   : raw.gid_type == IBV_GID_TYPE_ROCE_V1 ? GidType::roce_v1
                                                          : GidType::infiniband;
    } else {
      ibv_gid gid{};
      if (verbs.query_gid(context.get(), static_cast<uint8_t>(port), static_cast<int>(index), &gid) != 0) return false;
      std::memcpy(entry.gid.bytes.data(), gid.raw, 16);
      const std::string type = attribute("types", index);
      entry.type = type == "RoCE v2" ? GidType::roce_v2 : type.empty() ? GidType::infiniband : GidType::roce_v1;
    }
    entry.netdev = attribute("ndevs", index);
    char name[IF_NAMESIZE] = "";
    if (entry.netdev.empty() && raw.ndev_ifindex != 0 && ::if_indextoname(raw.ndev_ifindex, name) != nullptr)
      entry.netdev = name;
    const std::string state = topology.read("class/net/" + entry.netdev + "/operstate");
    entry.netdev_up = state != "down" && state != "lowerlayerdown" && state != "notpresent";
    return entry.gid.bytes != GidBytes{};
  }
};

void read_gids(const PortReader& reader, int entries, PortFacts& port) {
  for (int index = 0; index < std::min(entries, kReachableEntries); ++index) {
    GidFacts entry;
    if (!reader.read_entry(static_cast<uint32_t>(index), entry)) continue;
    if (port.layer == LinkLayer::infiniband) entry.type = GidType::infiniband;
    port.gids.push_back(entry);
  }
}

void read_port(const PortReader& reader, PortFacts& port) {
  ibv_port_attr attr{};
  const std::string name = reader.context.name() + " port " + std::to_string(port.number);
  if (const int error =
          reader.context.verbs().query_port(reader.context.get(), static_cast<uint8_t>(port.number), &attr);
      error != 0) {
    port.problem = verbs_failure(MR_CONFIG, "ibv_query_port", name, error).text;
    return;
  }
  port.state = attr.state;
  port.layer = layer_of(attr);
  port.lid = attr.lid;
  port.mtu = 128u << attr.active_mtu;
  port.gbits = gbits_of(reader.topology.read(folder_of(reader.context.name(), port.number) + "/rate"), attr);
  port.grh_required = (attr.flags & IBV_QPF_GRH_REQUIRED) != 0;
  read_gids(reader, attr.gid_tbl_len, port);
}

// Also those of a device that can't be opened: they have their places in the order of rails.
void list_ports(DeviceFacts& device, const Topology& topology) {
  for (const auto& name : topology.list(folder_of(device.name) + "/ports")) {
    PortFacts port;
    port.number = static_cast<uint32_t>(std::strtoul(name.c_str(), nullptr, 10));
    port.layer = layer_by_name(topology.read(folder_of(device.name, port.number) + "/link_layer"));
    device.ports.push_back(port);
  }
}

void read_limits(const VerbsContext& context, DeviceFacts& device) {
  const ibv_device_attr& attr = context.attributes();
  device.firmware = std::string(attr.fw_ver, ::strnlen(attr.fw_ver, sizeof attr.fw_ver));
  device.max_mr_size = attr.max_mr_size;
  device.max_qp = static_cast<uint32_t>(attr.max_qp);
  device.max_sge = static_cast<uint32_t>(attr.max_sge);
  device.max_rd_atomic = static_cast<uint32_t>(attr.max_qp_rd_atom);
  device.atomics = attr.atomic_cap != IBV_ATOMIC_NONE;
  device.on_demand_paging = context.has_on_demand_paging();
  device.memory_windows =
      (attr.device_cap_flags & (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B)) != 0;
}

// libibverbs looks for the device elsewhere when it may not open its file, and then tells of that.
std::string why_closed(const Status& failure, const std::string& file) {
  if (::faccessat(AT_FDCWD, file.c_str(), R_OK | W_OK, AT_EACCESS) == 0) return failure.text;
  return failure.text + "; " + file + ": " + std::strerror(errno) +
         " (in a container: docker run --device=/dev/infiniband)";
}

DeviceFacts read_device(const Verbs& verbs, const Listed& listed, const Topology& topology) {
  DeviceFacts device;
  device.name = listed.name;
  device.transport = listed.transport;
  read_place(device, topology);
  list_ports(device, topology);
  if (device.transport != Transport::reliable) return device;  // nothing more is asked about it
  try {
    const auto context = VerbsContext::open(verbs, device.name);
    read_limits(*context, device);
    device.ports.resize(context->attributes().phys_port_cnt);
    for (size_t i = 0; i < device.ports.size(); ++i) {
      device.ports[i].number = static_cast<uint32_t>(i + 1);
      read_port({*context, topology, device.ports[i].number}, device.ports[i]);
    }
  } catch (const Error& failure) {
    device.problem = why_closed(failure.status(), listed.file);
  }
  return device;
}

}  // namespace

std::vector<DeviceFacts> read_devices(const Verbs& verbs, const Topology& topology) {
  std::vector<DeviceFacts> devices;
  for (const auto& listed : list_devices(verbs)) devices.push_back(read_device(verbs, listed, topology));
  return devices;
}

RailChoice choose_rails(const Verbs& verbs, const Options& options, const Topology& topology) {
  try {
    RailChoice choice =
        choose_rails(read_devices(verbs, topology),
                     RailOptions{options.verbs_devices, options.raw.verbs_gid_index, options.raw.ip_family});
    sort_by_distance(choice.rails, topology.of_this_process(), topology);
    return choice;
  } catch (const Error& failure) {
    RailChoice none;
    none.status = failure.status();
    return none;
  }
}

std::string why_stale(const VerbsContext& context, const Rail& rail) {
  for (const Gid& chosen : rail.gids) {
    ibv_gid now{};
    const int failed =
        context.verbs().query_gid(context.get(), static_cast<uint8_t>(rail.port), static_cast<int>(chosen.index), &now);
    if (failed != 0 || std::memcmp(now.raw, chosen.bytes.data(), 16) != 0)
      return "entry " + std::to_string(chosen.index) + " of the GID table of " + rail.name() + " is no longer " +
             chosen.text();
  }
  return "";
}

}  // namespace mr
