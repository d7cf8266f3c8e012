// Where an engine can be found: "mrdma://10.0.0.5:4711/trainer-0?inc=1f..&boot=..&unix=..", or just "host:port".
#pragma once

#include <string>

#include "../base/stream.h"

namespace mr {

struct Address {
  HostPort tcp;           // the control stream's TCP listener; port 0: none
  std::string unix_name;  // abstract Unix socket, for peers on the same host
  std::string name;
  uint64_t incarnation = 0;  // 0: whoever answers
  std::string boot_id;

  std::string text() const;
  static Address parse(const std::string& text);  // throws MR_CONFIG; unknown parameters are ignored
};

// Of this boot of this host (and, where containers have their own, of this one).
std::string boot_id();

}  // namespace mr
