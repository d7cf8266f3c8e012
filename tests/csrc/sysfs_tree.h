// A host as its kernel would show it in /sys: a temporary folder, removed at the end.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace mr::test {

class SysfsTree {
 public:
  SysfsTree() {
    char name[] = "/tmp/monarch_rdma_sysfs_XXXXXX";
    if (::mkdtemp(name) == nullptr) throw std::runtime_error("no temporary folder");
    root_ = name;
  }
  ~SysfsTree() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  SysfsTree(const SysfsTree&) = delete;
  SysfsTree& operator=(const SysfsTree&) = delete;

  const std::string& root() const { return root_; }

  void file(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path) << text << "\n";
  }

  // As the kernel does: relative, so that the tree may lie anywhere.
  void link(const std::string& path, const std::string& target) {
    const std::filesystem::path at = root_ + "/" + path;
    std::filesystem::create_directories(at.parent_path());
    std::filesystem::create_directories(root_ + "/" + target);
    std::filesystem::create_directory_symlink(std::filesystem::relative(root_ + "/" + target, at.parent_path()), at);
  }

  // `path` from the root bus down: "pci0000:17/0000:17:01.0/0000:18:00.0".
  void pci(const std::string& path, int numa, const std::string& device_class = "0x020700",
           const std::string& vendor = "0x15b3") {
    const std::string folder = "devices/" + path, address = path.substr(path.rfind('/') + 1);
    file(folder + "/numa_node", std::to_string(numa));
    file(folder + "/class", device_class);
    file(folder + "/vendor", vendor);
    link("bus/pci/devices/" + address, folder);
  }

  void driver(const std::string& path, const std::string& name) {
    link("devices/" + path + "/driver", "bus/pci/drivers/" + name);
  }

  // A card at a PCI path ("" for one of software), with its interface ("" for none).
  void card(const std::string& name, const std::string& path, const std::string& netdev = "") {
    const std::string parent = path.empty() ? "devices/virtual" : "devices/" + path;
    link("class/infiniband/" + name, parent + "/infiniband/" + name);
    if (!path.empty()) link(parent + "/infiniband/" + name + "/device", parent);
    if (netdev.empty()) return;
    interface(netdev, parent);
    if (path.empty()) file("class/infiniband/" + name + "/parent", netdev);
  }

  void interface(const std::string& netdev, const std::string& parent, const std::string& state = "up") {
    file(parent + "/net/" + netdev + "/operstate", state);
    link("class/net/" + netdev, parent + "/net/" + netdev);
  }

  void port(const std::string& card, int number, const std::string& link_layer, const std::string& rate) {
    const std::string folder = "class/infiniband/" + card + "/ports/" + std::to_string(number);
    file(folder + "/link_layer", link_layer);
    file(folder + "/rate", rate);
  }

  void gid_of(const std::string& card, int port, int index, const std::string& netdev, const std::string& type) {
    const std::string attributes = "class/infiniband/" + card + "/ports/" + std::to_string(port) + "/gid_attrs/";
    file(attributes + "ndevs/" + std::to_string(index), netdev);
    file(attributes + "types/" + std::to_string(index), type);
  }

  // A NUMA node; without cores where `cores` is "".
  void node(int number, const std::string& cores, int socket, const std::string& distances) {
    const std::string folder = "devices/system/node/node" + std::to_string(number);
    file(folder + "/cpulist", cores);
    file(folder + "/distance", distances);
    if (!cores.empty())
      file("devices/system/cpu/cpu" + cores.substr(0, cores.find_first_of(",-")) + "/topology/physical_package_id",
           std::to_string(socket));
  }

 private:
  std::string root_;
};

// Two sockets, below each a PCI switch with a card and a GPU, a GPU at a root port of its own, and a card at another
// root; sub-NUMA clustering makes two nodes of a socket.
inline void two_socket_host(SysfsTree& tree) {
  tree.node(0, "0-23,96-119", 0, "10 11 21 21");
  tree.node(1, "24-47,120-143", 0, "11 10 21 21");
  tree.node(2, "48-71,144-167", 1, "21 21 10 11");
  tree.node(3, "72-95,168-191", 1, "21 21 11 10");
  for (const auto& [bus, numa] : {std::pair<std::string, int>{"1", 0}, {"a", 2}}) {
    const std::string up = "pci0000:" + bus + "7/0000:" + bus + "7:01.0/0000:" + bus + "8:00.0";
    tree.pci(up + "/0000:" + bus + "9:00.0/0000:" + bus + "a:00.0", numa);
    tree.pci(up + "/0000:" + bus + "9:01.0/0000:" + bus + "b:00.0", numa, "0x030200", "0x10de");
    tree.pci("pci0000:" + bus + "7/0000:" + bus + "7:05.0/0000:" + bus + "c:00.0", numa, "0x030200", "0x10de");
  }
  tree.pci("pci0000:37/0000:37:01.0/0000:38:00.0", 1);
}

}  // namespace mr::test
