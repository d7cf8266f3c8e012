// Which rails are near to the processor that a thread runs on: an order of rails for each NUMA node.
#pragma once

#include <cstdint>
#include <vector>

#include "topology.h"

namespace mr {

class NearRails {
 public:
  // Of the rails' cards.
  NearRails(const std::vector<Place>& rails, const Topology& topology);

  // One where all nodes are as near.
  size_t num_orders() const { return orders_.size(); }
  // Indices of all rails, the nearest first; those as near as each other stay in their order.
  const std::vector<size_t>& order(size_t index) const { return orders_[index]; }
  // The order for the processor that the calling thread runs on now. Calls no kernel.
  size_t here() const;

 private:
  std::vector<std::vector<size_t>> orders_;
  std::vector<size_t> by_core_;
};

}  // namespace mr
