// Contenders that take turns, so that a change in the machine's load meets all of them alike.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace mr::bench {

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Has the time come? Looks at the clock less often while steps are short, so that it doesn't cost what they do.
class Deadline {
 public:
  explicit Deadline(double seconds) : last_(now()), end_(last_ + seconds) {}
  bool passed() {
    if (++steps_ < stride_) return false;
    double time = now();
    stride_ = time - last_ > 2e-6 ? 1 : std::min(2 * stride_, 64u);
    last_ = time;
    steps_ = 0;
    return time >= end_;
  }

 private:
  double last_, end_;
  uint32_t steps_ = 0, stride_ = 1;
};

// How long one turn lasts: until `seconds` have passed or `operations` were done, but at least one operation.
struct Turn {
  double seconds;
  uint64_t operations;
};

struct Contender {
  std::string name;
  // Runs one turn and appends what it measured: seconds per operation (latency) or bytes per second (bandwidth).
  std::function<void(const Turn&, std::vector<double>&)> run;
  std::vector<double> samples;
};

// One turn each that is thrown away, then `rounds` turns each.
void take_turns(std::vector<Contender>& contenders, uint32_t rounds, const Turn& turn);

// q in [0, 1]; nearest rank. Samples need not be sorted and must not be empty.
double quantile(std::vector<double> samples, double q);
inline double median(const std::vector<double>& samples) { return quantile(samples, 0.5); }

}  // namespace mr::bench
