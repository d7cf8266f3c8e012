#include "topology.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>
#include <string_view>

#include <fcntl.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../base/fd.h"

namespace mr {
namespace {

// "0000:41:00.0"; the domain of a disk controller's inner bus has five digits.
bool is_pci_function(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot != std::string::npos && dot >= 10 && std::count(name.begin(), name.end(), ':') == 2 &&
         name.find_first_not_of("0123456789abcdef:.") == std::string::npos;
}

bool is_root_bus(const std::string& name) { return name.starts_with("pci") && name.find(':') != std::string::npos; }

int to_number(const std::string& text) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos || text.size() > 6) return -1;
  return std::stoi(text);
}

// Of a list like "0-23,96-119".
std::vector<size_t> cores_in(const std::string& list) {
  std::vector<size_t> cores;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t dash = part.find('-');
    const int first = to_number(part.substr(0, dash));
    const int last = dash == std::string::npos ? first : to_number(part.substr(dash + 1));
    for (int core = first; core >= 0 && core <= last; ++core) cores.push_back(static_cast<size_t>(core));
  }
  return cores;
}

std::string list_of_cores(int node) { return "devices/system/node/node" + std::to_string(node) + "/cpulist"; }

std::string real_path(const std::string& path) {
  char* found = ::realpath(path.c_str(), nullptr);
  if (found == nullptr) return "";
  std::string out = found;
  std::free(found);
  return out;
}

}  // namespace

const char* distance_name(Distance distance) {
  switch (distance) {
    case Distance::same_switch:
      return "same switch";
    case Distance::same_root:
      return "same root";
    case Distance::same_node:
      return "same NUMA node";
    case Distance::same_socket:
      return "same socket";
    case Distance::other_socket:
      return "other socket";
    case Distance::unknown:
      break;
  }
  return "unknown";
}

// By system calls: attributes of /sys may open and then fail to be read (that of an empty GID entry does, with EINVAL).
std::string Topology::read(const std::string& file) const {
  const Fd fd(::open((sysfs_ + "/" + file).c_str(), O_RDONLY | O_CLOEXEC));
  char text[4096];
  const ssize_t length = fd.valid() ? ::read(fd.get(), text, sizeof text) : -1;
  if (length <= 0) return "";
  const std::string_view all(text, static_cast<size_t>(length));
  const size_t first = all.find_first_not_of(" \t\n");
  if (first == all.npos) return "";
  return std::string(all.substr(first, all.find_last_not_of(" \t\n") - first + 1));
}

std::vector<std::string> Topology::list(const std::string& folder) const {
  std::vector<std::string> names;
  std::error_code failed;
  for (std::filesystem::directory_iterator at(sysfs_ + "/" + folder, failed), end; !failed && at != end;
       at.increment(failed))
    names.push_back(at->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

Place Topology::of_device(const std::string& folder) const {
  Place place;
  const std::string root = real_path(sysfs_), path = real_path(sysfs_ + "/" + folder);
  if (root.empty() || !path.starts_with(root)) return place;
  std::istringstream parts(path.substr(root.size()));
  for (std::string part; std::getline(parts, part, '/');)
    if (is_root_bus(part) || is_pci_function(part)) place.pci.push_back(part);
  if (!place.pci.empty() && !is_pci_function(place.pci.back())) place.pci.clear();
  // A device that is not itself on PCI (a port, an auxiliary device) has no node of its own; its parent has.
  const std::string node = place.pci.empty() ? folder : "bus/pci/devices/" + place.address();
  place.numa = to_number(read(node + "/numa_node"));
  if (place.numa < 0) place.numa = to_number(read(folder + "/numa_node"));
  return place;
}

Place Topology::of_pci(const std::string& address) const { return of_device("bus/pci/devices/" + address); }

Place Topology::of_this_process() const {
  cpu_set_t cores;
  Place place;
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return place;
  const std::vector<int> node_of = nodes_by_core();
  std::set<int> seen;
  for (size_t core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &cores)) seen.insert(core < node_of.size() ? node_of[core] : -1);
  if (seen.size() == 1) place.numa = *seen.begin();
  return place;
}

std::vector<int> Topology::nodes_by_core() const {
  std::vector<int> out;
  for (const int node : nodes())
    for (const size_t core : cores_in(read(list_of_cores(node)))) {
      if (core >= out.size()) out.resize(core + 1, -1);
      out[core] = node;
    }
  return out;
}

Place Topology::of_memory(const void* page) const {
  const uintptr_t mask = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)) - 1;
  void* pages[1] = {reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(page) & ~mask)};
  int node = -1;
  Place place;
  // Without target nodes it moves nothing and tells where the page is.
  if (::syscall(SYS_move_pages, 0, 1UL, pages, nullptr, &node, 0) == 0 && node >= 0) place.numa = node;
  return place;
}

std::vector<int> Topology::nodes() const {
  std::vector<int> found;
  for (const auto& name : list("devices/system/node"))
    if (name.starts_with("node") && to_number(name.substr(4)) >= 0) found.push_back(to_number(name.substr(4)));
  std::sort(found.begin(), found.end());
  return found;
}

// Memory without cores (on an accelerator, behind CXL) counts to the node that is nearest to it by the firmware's
// table.
int Topology::node_with_cores(int node) const {
  const auto folder = [](int n) { return "devices/system/node/node" + std::to_string(n); };
  if (!read(folder(node) + "/cpulist").empty()) return node;
  std::istringstream row(read(folder(node) + "/distance"));
  int best = -1, best_distance = 0, distance = 0;
  for (const int other : nodes()) {
    if (!(row >> distance)) break;
    if (other == node || read(folder(other) + "/cpulist").empty()) continue;
    if (best < 0 || distance < best_distance) best = other, best_distance = distance;
  }
  return best;
}

int Topology::socket_of(int node) const {
  const int with_cores = node_with_cores(node);
  if (with_cores < 0) return -1;
  const std::string cores = read("devices/system/node/node" + std::to_string(with_cores) + "/cpulist");
  const std::string first = cores.substr(0, cores.find_first_of(",-"));
  return to_number(read("devices/system/cpu/cpu" + first + "/topology/physical_package_id"));
}

Distance Topology::between(const Place& a, const Place& b) const {
  const bool nodes_known = a.numa >= 0 && b.numa >= 0;
  const size_t depth = std::min(a.pci.size(), b.pci.size());
  size_t shared = 0;
  while (shared < depth && a.pci[shared] == b.pci[shared]) ++shared;
  if (shared >= 2) return Distance::same_switch;
  // A virtual machine may show cards of two sockets below one root: the nodes know better.
  if (shared == 1 && (!nodes_known || a.numa == b.numa)) return Distance::same_root;
  if (!nodes_known) return nodes().size() <= 1 ? Distance::same_node : Distance::unknown;
  if (a.numa == b.numa) return Distance::same_node;
  const int a_socket = socket_of(a.numa), b_socket = socket_of(b.numa);
  return a_socket >= 0 && a_socket == b_socket ? Distance::same_socket : Distance::other_socket;
}

}  // namespace mr
