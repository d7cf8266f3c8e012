// Prints rows as they come, or one JSON document at the end.
#pragma once

#include <string>
#include <vector>

#include "figures.h"

namespace mr::bench {

class Report {
 public:
  explicit Report(bool json) : json_(json) {}
  void add(const Row& row);
  void add(const IdleRow& row);
  void add(const MemoryRow& row);
  void finish();

 private:
  void headline(const std::string& line);

  const bool json_;
  std::string headline_;
  std::vector<std::string> objects_;
};

}  // namespace mr::bench
