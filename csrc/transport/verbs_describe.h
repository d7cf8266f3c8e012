// What this host's cards are, which ports would be rails, and why: as a JSON document for people and Python.
#pragma once

#include <string>
#include <vector>

#include "rails.h"

namespace mr {

// Looks with the installed libibverbs. `problem` in the document tells why there is nothing to see.
std::string describe_verbs(const RailOptions& options);
std::string describe_nothing(const std::string& why);

// The same of known facts.
std::string describe_choice(const std::vector<DeviceFacts>& devices, const RailChoice& choice,
                            const Topology& topology);

}  // namespace mr
