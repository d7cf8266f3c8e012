#include "lanes.h"

#ifdef MR_VERBS
#include "verbs_lane.h"
#endif

namespace mr {
namespace {

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

}  // namespace

Lanes make_lanes(Options& options) {
  Lanes lanes;
  lanes.types = {
      {"shm", kShmOffer, MR_LANE_SHM, make_shm},
      {"tcp", kTcpFence, MR_LANE_TCP, make_tcp},
  };
  if (!options.allows("verbs")) return lanes;
  if (const std::string why = add_verbs(options, lanes); !why.empty()) {
    std::erase(options.lanes, "verbs");
    if (options.lanes.empty()) throw Error(MR_CONFIG, "option lanes = verbs: " + why);
  }
  return lanes;
}

}  // namespace mr
