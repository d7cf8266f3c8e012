// The facts that rails are chosen by, read from libibverbs and /sys.
#pragma once

#include <string>
#include <vector>

#include "options.h"
#include "rails.h"
#include "verbs.h"

namespace mr {

// All devices with their ports and the entries in use of their GID tables. What can't be read is told in the `problem`
// of its device or port. Throws MR_RESOURCE_EXHAUSTED where the devices can't be listed.
std::vector<DeviceFacts> read_devices(const Verbs& verbs, const Topology& topology = Topology());

// The rails of this host as they are now, with the reasons; the nearest to where this process runs first. Never throws.
RailChoice choose_rails(const Verbs& verbs, const Options& options, const Topology& topology = Topology());

// "" while the rail's addresses stand in the card's table where they were chosen: an address that was taken from the
// interface since leaves an entry that is empty or another's. Look before making queue pairs; else choose again.
std::string why_stale(const VerbsContext& context, const Rail& rail);

}  // namespace mr
