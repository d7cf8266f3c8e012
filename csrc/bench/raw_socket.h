// Plain socket steps shared by both ends of a RawPeer. All throw Failure.
#pragma once

#include <cstdint>

namespace mr::bench {

struct SocketPair {
  int here = -1, there = -1;
};
SocketPair loopback_tcp_pair();
SocketPair unix_pair(int type);

void send_all(int fd, const uint8_t* data, uint64_t size);
// False where the other side closed before the first byte.
bool receive_all(int fd, uint8_t* data, uint64_t size);

// One end of a ping-pong that only ever sleeps in epoll_wait.
class EpollEnd {
 public:
  explicit EpollEnd(int fd);
  ~EpollEnd();
  EpollEnd(const EpollEnd&) = delete;
  void send(const uint8_t* data, uint64_t size);
  void receive(uint8_t* data, uint64_t size);

 private:
  void wait(uint32_t events);
  int fd_, epoll_;
};

}  // namespace mr::bench
