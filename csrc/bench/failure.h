// How the benchmark program says that something went wrong: one sentence, then exit 2 (arguments) or 1 (the rest).
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../engine.h"

namespace mr::bench {

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws what the engine said unless `kind` is MR_OK.
inline void check(int kind, const mr_error& error, const std::string& doing) {
  if (kind != MR_OK) throw Failure(doing + ": " + error.message);
}

[[noreturn]] inline void throw_errno(const std::string& doing) { throw Failure(doing + ": " + std::strerror(errno)); }

}  // namespace mr::bench
