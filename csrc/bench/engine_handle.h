// An engine that closes itself, and the job secret it needs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"

#include "../engine.h"

namespace mr::bench {

using Secret = std::vector<uint8_t>;

// Random bytes for processes forked from this one.
Secret random_secret();
// Reads a file that only its owner may read; with `create`, makes it where it is missing.
Secret secret_from_file(const std::string& path, bool create);

struct EngineHandle {
  // `only`: the engine may use no other lane; nullptr = it may use all.
  EngineHandle(const Options& options, const Secret& secret, const Lane* only);
  ~EngineHandle() { close(); }
  EngineHandle(const EngineHandle&) = delete;
  void close();

  mr_engine* engine = nullptr;
};

}  // namespace mr::bench
