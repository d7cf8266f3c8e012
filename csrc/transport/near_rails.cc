#include "near_rails.h"

#include <sched.h>

#include <algorithm>
#include <numeric>

namespace mr {

NearRails::NearRails(const std::vector<Place>& rails, const Topology& topology) {
  const std::vector<int> nodes = topology.nodes_by_core();
  for (size_t core = 0; core < nodes.size(); ++core) {
    const size_t sibling = static_cast<size_t>(std::find(nodes.begin(), nodes.end(), nodes[core]) - nodes.begin());
    if (sibling < core) {
      by_core_.push_back(by_core_[sibling]);
      continue;
    }
    std::vector<size_t> order(rails.size());
    std::iota(order.begin(), order.end(), size_t{0});
    const Place here{{}, nodes[core]};
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return topology.between(rails[a], here) < topology.between(rails[b], here);
    });
    const auto known = std::find(orders_.begin(), orders_.end(), order);
    by_core_.push_back(static_cast<size_t>(known - orders_.begin()));
    if (known == orders_.end()) orders_.push_back(std::move(order));
  }
  if (!orders_.empty()) return;
  orders_.emplace_back(rails.size());
  std::iota(orders_[0].begin(), orders_[0].end(), size_t{0});
}

size_t NearRails::here() const {
  if (orders_.size() == 1) return 0;
  const int core = ::sched_getcpu();
  return core >= 0 && static_cast<size_t>(core) < by_core_.size() ? by_core_[static_cast<size_t>(core)] : 0;
}

}  // namespace mr
