#include "strangers.h"

#include <algorithm>
#include <cstdio>

namespace mr {
namespace {

constexpr size_t kMaxTold = 256;  // IPv6 has enough addresses to fill any memory

// Some of the text may be the stranger's own.
std::string printable(std::string text) {
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

}  // namespace

void Strangers::refused_on_loop(const std::string& from, const Status& why) {
  counters_.add("strangers_refused", 1);
  if (told_.size() == kMaxTold || !told_.insert(from).second) return;
  const char* const last = told_.size() == kMaxTold ? "; so many others that no more are told" : "";
  std::fprintf(stderr, "monarch_rdma: %s: refused a connection from %s: %s (told once%s)\n", printable(engine_).c_str(),
               printable(from).c_str(), printable(why.text.empty() ? "it left" : why.text).c_str(), last);
}

}  // namespace mr
