// A file of its own: the kernel's header, which knows all of tcp_info, and libc's cannot be included together.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

#include "stream.h"

namespace mr {

double tcp_round_trip(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return 0;
  const bool known = length >= offsetof(tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt && info.tcpi_min_rtt != ~0u;
  return known ? info.tcpi_min_rtt * 1e-6 : 0;
}

}  // namespace mr
