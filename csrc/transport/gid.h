// GIDs: the addresses of ports. On RoCE they stand for IP addresses of the interface.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace mr {

using GidBytes = std::array<uint8_t, 16>;

enum class GidScope { global, link_local, unusable };  // unusable: empty, loopback, multicast

struct Gid {
  uint32_t index = 0;  // in the port's table
  GidBytes bytes{};

  bool is_ipv4() const;  // ::ffff:a.b.c.d
  GidScope scope() const;
  std::string text() const;  // as an IPv6 address
};

// Our and their address for a connection: both IPv4 or both IPv6, for a RoCE v2 packet has one kind of header. Each
// list best first; the best of ours that has a partner. Nothing where none has.
struct GidPair {
  Gid ours, theirs;
};
std::optional<GidPair> pair_gids(const std::vector<Gid>& ours, const std::vector<Gid>& theirs);

}  // namespace mr
