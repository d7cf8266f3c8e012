#include "lanes.h"

#include "device_lanes.h"

#ifdef MR_VERBS
#include "verbs_lane.h"
#endif

namespace mr {
namespace {

// Held by the engine's list of lanes: the thread ends with it.
struct OpenDevices {
  explicit OpenDevices(std::shared_ptr<DeviceDomain> domain) : domain(std::move(domain)) {}
  ~OpenDevices() { domain->close(); }
  const std::shared_ptr<DeviceDomain> domain;
};

#ifdef MR_VERBS
// Held by the engine's list of lanes: the threads end with it.
struct OpenDomain {
  explicit OpenDomain(std::shared_ptr<VerbsDomain> domain) : domain(std::move(domain)) {}
  ~OpenDomain() { domain->close(); }
  const std::shared_ptr<VerbsDomain> domain;
};

std::string add_verbs(const Options& options, Lanes& lanes) {
  std::string why;
  const Verbs* const verbs = Verbs::installed(&why);
  if (verbs == nullptr) return why;
  auto domain = VerbsDomain::open(*verbs, options, &why);
  if (!domain) return why;
  lanes.keeper = domain;
  lanes.types.push_back(
      {"verbs", kVerbsAsk, MR_LANE_VERBS, [open = std::make_shared<OpenDomain>(std::move(domain))](LinkHost& host) {
         return make_verbs(host, open->domain);
       }});
  return "";
}
#else
std::string add_verbs(const Options&, Lanes&) { return "this build has no verbs lane"; }
#endif

// Not an option: lanes for memory of GPUs carry nothing else, and before all others comes what needs no copy.
void add_devices(Options& options, Lanes& lanes) {
  lanes.devices = std::make_shared<DeviceDomain>(lanes.keeper);
  const auto open = std::make_shared<OpenDevices>(lanes.devices);
  const auto by = [open](auto make) { return [open, make](LinkHost& host) { return make(host, open->domain); }; };
  lanes.types.push_back({"ipc", kIpcMap, MR_LANE_IPC, by(make_ipc), by(make_own_device)});
  lanes.types.push_back(
      {"staged", kStagedSlots, MR_LANE_STAGED | MR_LANE_SHM | MR_LANE_TCP | MR_LANE_VERBS, by(make_staged)});
  options.lanes.insert(options.lanes.begin(), "ipc");
  options.lanes.push_back("staged");
}

}  // namespace

Lanes make_lanes(Options& options) {
  Lanes lanes;
  lanes.types = {
      {"shm", kShmOffer, MR_LANE_SHM, make_shm},
      {"tcp", kTcpFence, MR_LANE_TCP, make_tcp},
  };
  if (options.allows("verbs")) {
    const std::string why = add_verbs(options, lanes);
    if (!why.empty()) std::erase(options.lanes, "verbs");
    if (options.lanes.empty()) throw Error(MR_CONFIG, "option lanes = verbs: " + why);
  }
  add_devices(options, lanes);
  return lanes;
}

}  // namespace mr
