// Who was shown out at a door, because it did not prove that it is a member: counted, and told on standard error once
// for each address, so that a scan that goes on for days is one line.
#pragma once

#include <set>
#include <string>

#include "../base/counters.h"
#include "../base/error.h"

namespace mr {

class Strangers {
 public:
  Strangers(std::string engine, Counters& counters) : engine_(std::move(engine)), counters_(counters) {}

  // On the loop. `from`: its address, without the port.
  void refused_on_loop(const std::string& from, const Status& why);

 private:
  const std::string engine_;
  Counters& counters_;
  std::set<std::string> told_;
};

}  // namespace mr
