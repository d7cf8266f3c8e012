// Lists as users write them in options: "a,b,c".
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace mr {

inline std::vector<std::string> split_list(const std::string& list) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    if (comma > at) out.push_back(list.substr(at, comma - at));
    at = comma + 1;
  }
  return out;
}

}  // namespace mr
