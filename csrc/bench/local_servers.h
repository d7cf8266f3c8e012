// Serving processes forked from this one.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "engine_handle.h"
#include "options.h"

namespace mr::bench {

class LocalServers {
 public:
  // Forks `options.peers` processes: construct it before this process has threads or an engine. The secret is theirs
  // by inheritance. They end with this process, however it ends.
  LocalServers(const Options& options, const Secret& secret);
  ~LocalServers();
  LocalServers(const LocalServers&) = delete;

  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  struct Server {
    pid_t pid;
    int stop;  // a byte here asks it to end
  };
  std::vector<Server> servers_;
  std::vector<std::string> addresses_;
};

}  // namespace mr::bench
