// A pair of engines on the fake fabric, connected, whose requests the card holds: for tests of a kernel that holds
// calls.
#pragma once

#include <algorithm>

#include "pattern.h"
#include "verbs_side.h"

namespace mr::test {

constexpr double kStuckTimeout = 0.3;  // long enough for a small one to be posted by the calling thread, see Stuck

inline double seconds_since(Time begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

// Connected, with a region of 4 MiB at the owner and as much memory here, whose requests never end while `stuck`.
struct Stuck : VerbsPair {
  static constexpr uint64_t kBytes = 4u << 20;
  explicit Stuck(const std::string& lanes = "verbs", bool rails = false)
      : VerbsPair([](mr_options& raw) { raw.verbs_timeout = 10; }, lanes, rails), owned(kBytes), here(kBytes) {
    paint(owned.data(), owned.size(), 1);
    remote = owner->remote(owner->share(owned.data(), owned.size()));
    if (rails) user->domain->keep(here.data(), here.size());
    // With all its queue pairs: none that comes later disturbs what is to be seen.
    const uint32_t cards = rails ? 2 : 1;
    for (uint32_t in_use = 0; in_use < cards || user->counter("verbs_pairs_opened") < 2 * cards;) {
      const OpRef op = user->read(remote, 0, here.data(), here.size());
      VerbsSide::expect_ok(op);
      in_use = op->rails;
    }
    VerbsSide::expect_ok(user->read(remote, 0, here.data(), 8));
    std::fill(here.begin(), here.end(), 7);
    fabric.decide([this](const auto& request) {
      return stuck && !request.pieces.empty() ? FakeFabric::Fate{FakeFabric::Fate::hold} : FakeFabric::Fate{};
    });
  }
  ~Stuck() { end(); }

  OpRef begin(bool write, uint64_t length, double timeout = kStuckTimeout) {
    return write ? user->write(remote, 0, here.data(), length, timeout)
                 : user->read(remote, 0, here.data(), length, timeout);
  }
  // The kernel lets the card go on, and then all calls return.
  void go_on() {
    stuck = false;
    fabric.kick();
  }

  Bytes owned, here;
  std::shared_ptr<RemoteRegion> remote;
  std::atomic<bool> stuck{true};
};

}  // namespace mr::test
