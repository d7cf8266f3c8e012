// Where cards, GPUs and memory sit in this host, and how far apart: from the PCI tree and the NUMA nodes that the
// kernel shows in /sys.
#pragma once

#include <string>
#include <vector>

namespace mr {

enum class Distance { same_switch, same_root, same_node, same_socket, other_socket, unknown };  // nearest first
const char* distance_name(Distance distance);

struct Place {
  std::vector<std::string>
      pci;        // from the root bus down: "pci0000:40", "0000:40:01.1", "0000:41:00.0"; empty: not on PCI
  int numa = -1;  // NUMA node; -1 = not known

  std::string address() const { return pci.empty() ? "" : pci.back(); }
};

class Topology {
 public:
  explicit Topology(std::string sysfs = "/sys") : sysfs_(std::move(sysfs)) {}

  Place of_device(const std::string& folder) const;  // below sysfs: "class/infiniband/mlx5_0/device"
  Place of_pci(const std::string& address) const;    // a GPU: "0000:c1:00.0"
  Place of_this_process() const;                     // its node, where it may run on the cores of one only
  Place of_memory(const void* page) const;           // of this process; must have been touched
  Distance between(const Place& a, const Place& b) const;

  std::vector<int> nodes() const;
  std::vector<int> nodes_by_core() const;  // -1 = not known
  const std::string& sysfs() const { return sysfs_; }
  std::string read(const std::string& file) const;  // without white space at its ends; "" where it can't be read
  std::vector<std::string> list(const std::string& folder) const;  // names in it, sorted

 private:
  int socket_of(int node) const;  // -1 = not known
  int node_with_cores(int node) const;

  std::string sysfs_;
};

}  // namespace mr
