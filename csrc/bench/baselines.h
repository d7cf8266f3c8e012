// The raw mechanism behind each lane, as contenders that take turns with the engine.
#pragma once

#include <vector>

#include "mapped_view.h"
#include "options.h"
#include "protocol.h"
#include "raw_peer.h"
#include "samples.h"
#include "transfers.h"

namespace mr::bench {

// `where`: the owner's memory. `raw` may be nullptr: then those over sockets are left out.
void add_latency_baselines(std::vector<Contender>& contenders, Lane lane, const TransferPlan& plan, const Answer& where,
                           RawPeer* raw);
void add_bandwidth_baselines(std::vector<Contender>& contenders, Lane lane, const TransferPlan& plan,
                             const Answer& where, const Options& options, RawPeer* raw);
// What needs no call into the engine.
void add_mapped_view(std::vector<Contender>& contenders, Figure figure, MappedView& view, uint64_t size);

}  // namespace mr::bench
