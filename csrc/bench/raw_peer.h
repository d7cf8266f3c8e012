// A bare process at the other end of plain sockets: what a read over tcp and a control frame are compared with.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "placement.h"
#include "samples.h"

namespace mr::bench {

class RawPeer {
 public:
  static constexpr uint32_t kMaxStreams = 4;

  // Forks: construct it before this process has threads. The peer ends when this process does.
  explicit RawPeer(int cpu);  // where the peer runs
  ~RawPeer();
  RawPeer(const RawPeer&) = delete;

  // Blocking loopback TCP with TCP_NODELAY: sends `request` bytes, waits for `reply` bytes. Appends round-trip seconds.
  void tcp_ping_pong(uint64_t request, uint64_t reply, const Turn& turn, std::vector<double>& samples);
  // Non-blocking Unix socket, a thread in epoll_wait on each side. Appends round-trip seconds.
  void unix_ping_pong(uint64_t size, const Turn& turn, std::vector<double>& samples);
  // Moves `bytes` once over loopback TCP, split over `streams` sockets, here or to the peer. Returns seconds.
  double stream(uint64_t bytes, uint32_t streams, bool to_peer);

 private:
  pid_t pid_ = 0;
  int control_ = -1;  // orders to the peer
  int unix_ = -1;
  int tcp_[kMaxStreams] = {-1, -1, -1, -1};
  Buffer buffer_;
};

}  // namespace mr::bench
