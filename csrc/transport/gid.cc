#include "gid.h"

#include <algorithm>
#include <cstring>

#include <arpa/inet.h>

namespace mr {

bool Gid::is_ipv4() const {
  static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(bytes.data(), mapped, sizeof mapped) == 0;
}

GidScope Gid::scope() const {
  if (is_ipv4()) {
    const uint8_t* ip = bytes.data() + 12;
    if (ip[0] == 0 || ip[0] == 127 || ip[0] >= 224) return GidScope::unusable;
    return ip[0] == 169 && ip[1] == 254 ? GidScope::link_local : GidScope::global;
  }
  // The upper half of a loopback or empty address is zero, and that of an InfiniBand port is its subnet's.
  if (std::all_of(bytes.begin(), bytes.begin() + 8, [](uint8_t b) { return b == 0; })) return GidScope::unusable;
  if (bytes[0] == 0xff) return GidScope::unusable;
  return bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80 ? GidScope::link_local : GidScope::global;
}

std::string Gid::text() const {
  char out[INET6_ADDRSTRLEN] = "";
  ::inet_ntop(AF_INET6, bytes.data(), out, sizeof out);
  return out;
}

std::optional<GidPair> pair_gids(const std::vector<Gid>& ours, const std::vector<Gid>& theirs) {
  for (const Gid& our : ours)
    for (const Gid& their : theirs)
      if (our.is_ipv4() == their.is_ipv4() && our.scope() == their.scope()) return GidPair{our, their};
  return std::nullopt;
}

}  // namespace mr
