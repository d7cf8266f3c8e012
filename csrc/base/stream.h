// A connected, non-blocking byte stream: a plain socket, or TLS over one. Owned by one loop.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <string>
#include <vector>

#include "fd.h"
#include "tls.h"

namespace mr {

class Stream {
 public:
  using Want = Tls::Want;
  using Io = Tls::Io;

  explicit Stream(Fd socket);                            // plain
  Stream(Fd socket, bool server, const Secret& secret);  // TLS 1.3 PSK
  Stream(Stream&&) = default;
  Stream& operator=(Stream&&) = default;

  int fd() const { return fd_.get(); }
  bool is_tls() const { return tls_ != nullptr; }

  Io handshake();  // plain: established at once
  // Scatter and gather. Io.bytes may be less than asked; Io.want says what to wait for when it is 0. The end of the
  // stream is Io.closed: with an ok status where the other side ended it, else with MR_PEER_LOST. A plain socket can't
  // tell a peer that ended from one that was killed; TLS can.
  // On a Unix socket descriptors that arrive are appended to *fds where it is given, else closed by the kernel; fewer
  // than were sent arrive if there are more than kMaxFds at once, or this process has no free ones.
  Io read(const iovec* parts, int count, std::vector<Fd>* fds = nullptr);
  // pass_fd >= 0 travels with the first byte; only on a plain Unix socket.
  Io write(const iovec* parts, int count, int pass_fd = -1);
  bool pending() const { return tls_ && tls_->pending(); }  // readable without the socket being so
  Digest binding(std::string_view label) const;             // TLS exporter; zeros on a plain socket
  void shutdown();                                          // orderly end of our direction, best effort

  static constexpr int kMaxFds = 8;

 private:
  Fd fd_;
  std::unique_ptr<Tls> tls_;
};

// Non-blocking sockets, close-on-exec. Each throws MR_CONFIG where the place named can't be one (no such host, no such
// address here), MR_RESOURCE_EXHAUSTED where a limit is reached, and MR_PEER_LOST with the errno where nobody answers.
struct HostPort {
  std::string host;  // a numeric address once resolved; "" is every address of this host
  uint16_t port = 0;
  std::string text() const;                   // [::1]:5 or 1.2.3.4:5
  static HostPort parse(const std::string&);  // throws MR_CONFIG
  HostPort resolve(int ip_family) const;      // names that /etc/hosts and DNS know. Blocks: never on the loop
};
// ip_family: 0 = either, 4, 6. Resolves names, so not on the loop. Tries the ports at.port..port_max; port 0 = any.
// *bound, where given, is the address listened on, "0.0.0.0" or "::" for every one ("::" takes IPv4 too where ip_family
// is 0).
Fd tcp_listen(const HostPort& at, uint16_t port_max, int ip_family, HostPort* bound);
Fd tcp_connect_start(const HostPort& to, int ip_family);  // numeric. Connecting: wait for EPOLLOUT, then socket_error
// Unix sockets: a name that begins with / is a file's, any other one an abstract name.
Fd unix_listen(const std::string& name);
// MR_RESOURCE_EXHAUSTED with EAGAIN: the listener's queue is full, try later. No event will tell.
Fd unix_connect_start(const std::string& name);
// Whether a process has the socket whose file this is. It does not notice.
bool unix_socket_lives(const std::string& path);
int socket_error(int fd);  // 0, or the errno that connecting ended with
// No delay, keepalive; unacknowledged for `user_timeout` seconds ends the connection (<= 0: the kernel's minutes).
void tune_tcp(int fd, double user_timeout);
std::string peer_host(int fd);  // the other end's address, without the port; "" where there is none
double tcp_round_trip(int fd);  // the shortest yet, in seconds; 0 where the kernel does not tell
// The first fit address of a network interface, or "" if `name` is none: "eth0" -> "10.0.0.5". MR_CONFIG where the
// interface has no address of that family.
std::string interface_address(const std::string& name, int ip_family);

}  // namespace mr
