#include "stream.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace mr {
namespace {

constexpr int kMaxParts = IOV_MAX;
constexpr int kRtoMaxMs = 44;  // TCP_RTO_MAX_MS, since Linux 6.15

union FdMessage {  // aligned as the kernel wants it
  cmsghdr header;
  char bytes[CMSG_SPACE(Stream::kMaxFds * sizeof(int))];
};

bool has_bytes(const iovec* parts, int count) {
  return std::any_of(parts, parts + count, [](const iovec& part) { return part.iov_len != 0; });
}

// What a failed system call on the socket means, from errno.
Stream::Io outcome(Stream::Want want) {
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {0, want, false, {}};
  const bool limit = errno == ETOOMANYREFS || errno == ENOMEM || errno == ENOBUFS;
  const int kind = limit ? MR_RESOURCE_EXHAUSTED : MR_PEER_LOST;
  return {0, Stream::Want::nothing, true, fail(kind, "the connection broke", errno)};
}

void collect_fds(msghdr& message, std::vector<Fd>* fds) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t number = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < number; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      fds->emplace_back(fd);
    }
  }
}

}  // namespace

Stream::Stream(Fd socket) : fd_(std::move(socket)) {}

Stream::Stream(Fd socket, bool server, const Secret& secret)
    : fd_(std::move(socket)), tls_(std::make_unique<Tls>(fd_.get(), server, secret)) {}

Stream::Io Stream::handshake() { return tls_ ? tls_->handshake() : Io{}; }

Stream::Io Stream::read(const iovec* parts, int count, std::vector<Fd>* fds) {
  if (tls_) return tls_->read(parts, count);
  if (!has_bytes(parts, count)) return {};  // the kernel's 0 would look like the end
  FdMessage rights;
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(std::min(count, kMaxParts));
  if (fds != nullptr) {
    message.msg_control = &rights;
    message.msg_controllen = sizeof rights;
  }
  ssize_t n;
  do n = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  if (n < 0) return outcome(Want::read);
  if (fds != nullptr) collect_fds(message, fds);
  return {static_cast<size_t>(n), Want::nothing, n == 0, {}};
}

Stream::Io Stream::write(const iovec* parts, int count, int pass_fd) {
  if (tls_)
    return pass_fd < 0 ? tls_->write(parts, count) : throw Error(MR_CONFIG, "a descriptor can't travel over TLS");
  if (!has_bytes(parts, count)) return {};
  FdMessage rights{};
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(std::min(count, kMaxParts));
  if (pass_fd >= 0) {
    message.msg_control = &rights;
    message.msg_controllen = CMSG_SPACE(sizeof(int));
    rights.header.cmsg_level = SOL_SOCKET;
    rights.header.cmsg_type = SCM_RIGHTS;
    rights.header.cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(&rights.header), &pass_fd, sizeof pass_fd);
  }
  ssize_t n;
  do n = ::sendmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  while (n < 0 && errno == EINTR);
  if (n < 0) return outcome(Want::write);
  return {static_cast<size_t>(n), Want::nothing, false, {}};
}

Digest Stream::binding(std::string_view label) const { return tls_ ? tls_->exporter(label) : Digest{}; }

void Stream::shutdown() {
  if (tls_) tls_->close_notify();
  ::shutdown(fd_.get(), SHUT_WR);
}

// --- Addresses.

namespace {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }

  void set_port(uint16_t port) {
    if (storage.ss_family == AF_INET6)
      reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port = htons(port);
    else
      reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(port);
  }
};

int family_of(int ip_family) {
  if (ip_family == 0) return AF_UNSPEC;
  if (ip_family == 4) return AF_INET;
  if (ip_family == 6) return AF_INET6;
  throw Error(MR_CONFIG, "ip_family is " + std::to_string(ip_family) + ", it can be 0, 4 or 6");
}

std::string of_family(int ip_family) { return ip_family == 0 ? "" : " of IPv" + std::to_string(ip_family); }

std::vector<Address> look_up(const HostPort& at, int ip_family, int flags) {
  addrinfo hints{};
  hints.ai_family = family_of(ip_family);
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int failure =
      ::getaddrinfo(at.host.empty() ? nullptr : at.host.c_str(), std::to_string(at.port).c_str(), &hints, &list);
  if (failure != 0) {
    const bool names = (flags & AI_NUMERICHOST) == 0;
    throw Error(MR_CONFIG, (names ? "there is no host '" : "there is no numeric address '") + at.host + "'" +
                               of_family(ip_family) + " (" + ::gai_strerror(failure) + ")");
  }
  std::vector<Address> out;
  for (const addrinfo* info = list; info != nullptr; info = info->ai_next) {
    Address& address = out.emplace_back();
    std::memcpy(&address.storage, info->ai_addr, info->ai_addrlen);
    address.length = info->ai_addrlen;
  }
  ::freeaddrinfo(list);
  return out;
}

HostPort numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  const int failure =
      ::getnameinfo(address, length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  if (failure != 0) throw Error(MR_CONFIG, std::string("can't write an address down: ") + ::gai_strerror(failure));
  return {host, static_cast<uint16_t>(std::stoul(port))};
}

Fd make_socket(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.valid()) return fd;
  if (errno == EAFNOSUPPORT) throw Error(MR_CONFIG, "this host has no such sockets (IPv6 may be off)", errno);
  throw Error(MR_RESOURCE_EXHAUSTED, "can't make a socket (raise `ulimit -n`)", errno);
}

// Invalid, with errno, where the port can't be had.
Fd try_listen(const Address& address, bool ipv6_only) {
  Fd fd = make_socket(address.storage.ss_family);
  const int on = 1, only = ipv6_only;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.storage.ss_family == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
  if (::bind(fd.get(), address.get(), address.length) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) return fd;
  const int saved = errno;
  fd.reset();
  errno = saved;
  return fd;
}

// Where to listen, best first. Every address: one IPv6 socket takes both families, where there is IPv6.
std::vector<Address> listen_addresses(const HostPort& at, int ip_family) {
  auto found = look_up(at, ip_family, AI_PASSIVE);
  if (at.host.empty())
    std::stable_sort(found.begin(), found.end(), [](const Address& a, const Address& b) {
      return a.storage.ss_family == AF_INET6 && b.storage.ss_family != AF_INET6;
    });
  return found;
}

}  // namespace

std::string HostPort::text() const {
  const bool brackets = host.find(':') != std::string::npos;
  return (brackets ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

HostPort HostPort::parse(const std::string& text) {
  const auto refuse = [&](const char* why) {
    return Error(MR_CONFIG, "'" + text + "' is no HOST:PORT or [IPV6]:PORT: " + why);
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) throw refuse("the port is missing");
  HostPort out{text.substr(0, colon), 0};
  if (out.host.size() >= 2 && out.host.front() == '[' && out.host.back() == ']')
    out.host = out.host.substr(1, out.host.size() - 2);
  else if (out.host.find(':') != std::string::npos)
    throw refuse("an IPv6 address needs [ ] around it");
  if (out.host.empty()) throw refuse("the host is missing");
  if (out.host.find_first_of("[]/@ \t\r\n") != std::string::npos || out.host.find('\0') != std::string::npos)
    throw refuse("the host has a character that none has");
  const char* const stop = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data() + colon + 1, stop, out.port);
  if (error != std::errc() || end != stop) throw refuse("the port is no number from 0 to 65535");
  return out;
}

HostPort HostPort::resolve(int ip_family) const {
  const Address first = look_up(*this, ip_family, 0).front();
  return numeric(first.get(), first.length);
}

Fd tcp_listen(const HostPort& at, uint16_t port_max, int ip_family, HostPort* bound) {
  const std::string host = at.host.empty() ? "every address" : at.host;
  const std::string ports = "ports " + std::to_string(at.port) + " to " + std::to_string(port_max);
  if (at.port != 0 && port_max < at.port) throw Error(MR_CONFIG, "there are no TCP " + ports);
  int last_errno = 0;
  for (Address& address : listen_addresses(at, ip_family)) {
    const uint32_t last = at.port == 0 ? 0 : port_max;
    for (uint32_t port = at.port; port <= last; ++port) {
      address.set_port(static_cast<uint16_t>(port));
      Fd fd;
      try {
        fd = try_listen(address, ip_family == 6 || !at.host.empty());
      } catch (const Error& error) {
        if (error.status().kind != MR_CONFIG) throw;
        last_errno = error.status().sys_errno;  // this family is off: the next address may do
        break;
      }
      if (fd.valid()) {
        address.length = sizeof address.storage;
        if (::getsockname(fd.get(), address.get(), &address.length) != 0)
          throw Error(MR_CONFIG, "can't tell which port is listened on", errno);
        if (bound != nullptr) *bound = numeric(address.get(), address.length);
        return fd;
      }
      last_errno = errno;
      if (last_errno != EADDRINUSE && last_errno != EACCES) break;
    }
  }
  const std::string where = "TCP " + (at.port == 0 ? "port" : ports) + " of " + host;
  if (last_errno == EADDRINUSE)
    throw Error(MR_RESOURCE_EXHAUSTED, "no free " + where + " to listen on (widen the port range)", last_errno);
  throw Error(MR_CONFIG, "can't listen on " + where, last_errno);
}

Fd tcp_connect_start(const HostPort& to, int ip_family) {
  const Address address = look_up(to, ip_family, AI_NUMERICHOST).front();
  Fd fd = make_socket(address.storage.ss_family);
  if (::connect(fd.get(), address.get(), address.length) != 0 && errno != EINPROGRESS && errno != EINTR)
    throw Error(errno == EADDRNOTAVAIL || errno == EAGAIN ? MR_RESOURCE_EXHAUSTED : MR_PEER_LOST,
                "can't connect to " + to.text(), errno);
  return fd;
}

namespace {

struct UnixAddress : Address {
  explicit UnixAddress(const std::string& name) {
    auto& address = reinterpret_cast<sockaddr_un&>(storage);
    const bool is_path = !name.empty() && name.front() == '/';
    const std::string text = is_path && name.size() >= sizeof address.sun_path ? short_path(name) : name;
    if (text.empty() || text.size() >= sizeof address.sun_path)
      throw Error(MR_CONFIG, "the Unix socket name '" + name + "' has " + std::to_string(name.size()) +
                                 " bytes, it can have 1 to " + std::to_string(sizeof address.sun_path - 1));
    address.sun_family = AF_UNIX;
    // An abstract name has a zero byte first, a path one after it.
    std::memcpy(address.sun_path + (is_path ? 0 : 1), text.data(), text.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }

  // The same file by way of its open directory.
  std::string short_path(const std::string& path) {
    const size_t slash = path.rfind('/');
    directory = Fd(::open(path.substr(0, slash).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    return directory.valid() ? "/proc/self/fd/" + std::to_string(directory.get()) + path.substr(slash) : path;
  }

  Fd directory;
};

}  // namespace

Fd unix_listen(const std::string& name) {
  const UnixAddress address(name);
  Fd fd = make_socket(AF_UNIX);
  if (::bind(fd.get(), address.get(), address.length) != 0 || ::listen(fd.get(), SOMAXCONN) != 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "can't listen on the Unix socket '" + name + "'", errno);
  return fd;
}

Fd unix_connect_start(const std::string& name) {
  const UnixAddress address(name);
  Fd fd = make_socket(AF_UNIX);
  int result;
  do result = ::connect(fd.get(), address.get(), address.length);
  while (result != 0 && errno == EINTR);
  if (result != 0)
    throw Error(errno == EAGAIN ? MR_RESOURCE_EXHAUSTED : MR_PEER_LOST,
                "can't connect to the Unix socket '" + name + "'", errno);
  return fd;
}

bool unix_socket_lives(const std::string& path) {
  const UnixAddress address(path);
  const Fd probe(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  // A stream socket that lives is of the wrong type for this one (EPROTOTYPE), and is left in peace.
  return !probe.valid() || ::connect(probe.get(), address.get(), address.length) == 0 || errno != ECONNREFUSED;
}

std::string peer_host(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  char host[NI_MAXHOST];
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      (address.ss_family != AF_INET && address.ss_family != AF_INET6) ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&address), length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0)
    return "";
  return host;
}

int socket_error(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

void tune_tcp(int fd, double user_timeout) {
  // What a kernel does not know is no reason to fail: the heartbeat finds dead peers too.
  const auto set = [fd](int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof value); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  if (!(user_timeout > 0)) return;
  const double seconds = std::min(user_timeout, 86400.0);
  // Kernels ask again after pauses that double: after a cut they would notice its end when it is that long ago, which
  // is as good as a cut of twice the length.
  set(IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1);
  set(IPPROTO_TCP, kRtoMaxMs, std::clamp(static_cast<int>(seconds * 1000 / 5), 1000, 120000));
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::ceil(seconds * 1000)));
  // An idle connection is only asked now and then: where something is pending, heartbeats look closer.
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::clamp(static_cast<int>(std::ceil(seconds)), 60, 32767));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::clamp(static_cast<int>(std::ceil(seconds / 3)), 1, 32767));
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

std::string interface_address(const std::string& name, int ip_family) {
  const int family = family_of(ip_family);
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw Error(MR_RESOURCE_EXHAUSTED, "can't list the network interfaces", errno);
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  bool known = false;
  int best_rank = 0;
  std::string best;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (name != entry->ifa_name) continue;
    known = true;
    const int its = entry->ifa_addr == nullptr ? AF_UNSPEC : entry->ifa_addr->sa_family;
    if ((its != AF_INET && its != AF_INET6) || (family != AF_UNSPEC && its != family)) continue;
    int rank = its == AF_INET ? 3 : 2;  // a link-local address only where there is no other
    if (its == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr))
      rank = 1;
    if (rank <= best_rank) continue;
    best_rank = rank;
    best = numeric(entry->ifa_addr, its == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6)).host;
  }
  if (known && best.empty())
    throw Error(MR_CONFIG, "the network interface '" + name + "' has no address" + of_family(ip_family));
  return best;
}

}  // namespace mr
