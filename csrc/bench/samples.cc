#include "samples.h"

#include <algorithm>
#include <cmath>

namespace mr::bench {

void take_turns(std::vector<Contender>& contenders, uint32_t rounds, const Turn& turn) {
  std::vector<double> discarded;
  for (auto& contender : contenders) contender.run({turn.seconds / 4, turn.operations}, discarded);
  for (uint32_t round = 0; round < rounds; ++round)
    for (size_t i = 0; i < contenders.size(); ++i) {
      Contender& contender = contenders[(round + i) % contenders.size()];
      contender.run(turn, contender.samples);
    }
}

double quantile(std::vector<double> samples, double q) {
  auto rank = static_cast<size_t>(std::ceil(q * static_cast<double>(samples.size())));
  auto nth = samples.begin() + static_cast<std::ptrdiff_t>(rank > 0 ? rank - 1 : 0);
  std::nth_element(samples.begin(), nth, samples.end());
  return *nth;
}

}  // namespace mr::bench
