// Dissemination: in each round a member gives all that it has, or what the other one lacks of it, to one that is twice
// as far away; any number of members needs log2 of it rounds, rounded up. Hensgen, Finkel, Manber: Two algorithms for
// barrier synchronization, 1988; Bruck et al.: Efficient algorithms for all-to-all communications, 1997.
#include <algorithm>

#include "plans.h"

namespace mr {

Plan dissemination(uint32_t rank, uint32_t size) {
  Plan plan{rank, size, size};
  for (uint32_t distance = 1; distance < size; distance *= 2, plan.end_round()) {
    const uint32_t count = std::min(distance, size - distance);
    plan.send((rank + size - distance) % size, {0, count});
    plan.receive((rank + distance) % size, {distance, distance + count});
  }
  return plan;
}

}  // namespace mr
