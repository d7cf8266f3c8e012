#include "raw_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "failure.h"

namespace mr::bench {
namespace {

void no_delay(int fd) {
  int on = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) throw_errno("TCP_NODELAY");
}

int accept_from(int listener, const sockaddr_in& expected) {
  for (;;) {  // another process may connect to our port meanwhile: hang up on it
    sockaddr_in from{};
    socklen_t length = sizeof from;
    int fd = accept4(listener, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC);
    if (fd < 0) throw_errno("accept");
    if (from.sin_port == expected.sin_port && from.sin_addr.s_addr == expected.sin_addr.s_addr) return fd;
    close(fd);
  }
}

}  // namespace

SocketPair loopback_tcp_pair() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || bind(listener, any, length) != 0 || listen(listener, 8) != 0 ||
      getsockname(listener, any, &length) != 0)
    throw_errno("listening on loopback");
  SocketPair pair;
  pair.here = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (pair.here < 0 || connect(pair.here, any, length) != 0 || getsockname(pair.here, any, &length) != 0)
    throw_errno("connecting over loopback");
  pair.there = accept_from(listener, address);
  close(listener);
  no_delay(pair.here);
  no_delay(pair.there);
  return pair;
}

SocketPair unix_pair(int type) {
  int fds[2];
  if (socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, fds) != 0) throw_errno("socketpair");
  return {fds[0], fds[1]};
}

void send_all(int fd, const uint8_t* data, uint64_t size) {
  while (size > 0) {
    ssize_t sent = ::send(fd, data, size, MSG_NOSIGNAL);
    if (sent < 0) throw_errno("send to the raw peer");
    data += sent;
    size -= static_cast<uint64_t>(sent);
  }
}

bool receive_all(int fd, uint8_t* data, uint64_t size) {
  for (uint64_t done = 0; done < size;) {
    ssize_t got = recv(fd, data + done, size - done, 0);
    if (got < 0) throw_errno("receive from the raw peer");
    if (got == 0 && done == 0) return false;
    if (got == 0) throw Failure("the raw peer ended in the middle of a message");
    done += static_cast<uint64_t>(got);
  }
  return true;
}

EpollEnd::EpollEnd(int fd) : fd_(fd), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  epoll_event event{EPOLLIN, {}};
  if (epoll_ < 0 || fcntl(fd, F_SETFL, O_NONBLOCK) != 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0)
    throw_errno("epoll");
}

EpollEnd::~EpollEnd() { close(epoll_); }

void EpollEnd::wait(uint32_t events) {
  epoll_event event{events, {}};
  if (events != EPOLLIN && epoll_ctl(epoll_, EPOLL_CTL_MOD, fd_, &event) != 0) throw_errno("epoll_ctl");
  epoll_event ready;
  if (epoll_wait(epoll_, &ready, 1, -1) < 0) throw_errno("epoll_wait");
  event.events = EPOLLIN;
  if (events != EPOLLIN && epoll_ctl(epoll_, EPOLL_CTL_MOD, fd_, &event) != 0) throw_errno("epoll_ctl");
}

void EpollEnd::send(const uint8_t* data, uint64_t size) {
  while (size > 0) {
    ssize_t sent = ::send(fd_, data, size, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) throw_errno("send to the raw peer");
    if (sent < 0) {
      wait(EPOLLOUT);
      continue;
    }
    data += sent;
    size -= static_cast<uint64_t>(sent);
  }
}

void EpollEnd::receive(uint8_t* data, uint64_t size) {
  for (uint64_t done = 0; done < size;) {
    wait(EPOLLIN);
    ssize_t got = recv(fd_, data + done, size - done, 0);
    if (got < 0 && errno == EAGAIN) continue;
    if (got < 0) throw_errno("receive from the raw peer");
    if (got == 0) throw Failure("the raw peer ended");
    done += static_cast<uint64_t>(got);
  }
}

}  // namespace mr::bench
