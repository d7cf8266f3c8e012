// mr_options with owned strings, checked.
#pragma once

#include <string>
#include <vector>

#include "../base/tls.h"
#include "../engine.h"

namespace mr {

struct Options {
  static Options from(const mr_options& raw);  // throws MR_CONFIG naming the option and its value
  static mr_options defaults();

  mr_options raw{};  // numbers only; use the fields below for strings
  std::string name, listen_host, advertise_host, unix_socket_dir, allow_ptrace, verbs_devices;
  std::vector<std::string> lanes;  // best first
  Secret secret = Secret::random();

  bool allows(const std::string& lane) const;
};

}  // namespace mr
