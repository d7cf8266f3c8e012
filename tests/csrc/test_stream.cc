// Streams over real sockets, descriptors that travel, and the addresses that sockets are made from.
#include "base/stream.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"

using namespace mr;
using Io = Stream::Io;
using Want = Stream::Want;

namespace {

const Secret& job_secret() {
  static const Secret secret = Secret::random();
  return secret;
}

void await(int fd, short events) {
  pollfd ready{fd, events, 0};
  if (::poll(&ready, 1, 20000) != 1) throw test::CheckFailed("waited in vain for a socket");
}

Status refused(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.status();
  }
  throw test::CheckFailed("nothing was thrown");
}

bool mentions(const Status& status, const std::string& word) { return status.text.find(word) != std::string::npos; }

Fd accept_one(const Fd& listener) {
  await(listener.get(), POLLIN);
  Fd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  CHECK(fd.valid());
  return fd;
}

struct Sockets {
  Fd client, server;
};

Sockets tcp_pair(const std::string& host = "127.0.0.1") {
  HostPort bound;
  const Fd listener = tcp_listen({host, 0}, 0, 0, &bound);
  Sockets out;
  out.client = tcp_connect_start(bound, 0);
  out.server = accept_one(listener);
  await(out.client.get(), POLLOUT);
  CHECK_EQ(socket_error(out.client.get()), 0);
  return out;
}

std::string unique_name() { return "monarch_rdma-test-" + std::to_string(random_u64()); }

Sockets unix_pair() {
  const std::string name = unique_name();
  const Fd listener = unix_listen(name);
  Sockets out;
  out.client = unix_connect_start(name);
  out.server = accept_one(listener);
  await(out.client.get(), POLLOUT);
  CHECK_EQ(socket_error(out.client.get()), 0);
  return out;
}

struct Pair {
  Stream client, server;
};

Pair plain(Sockets sockets) { return {Stream(std::move(sockets.client)), Stream(std::move(sockets.server))}; }

Pair tls(Sockets sockets) {
  Pair pair{Stream(std::move(sockets.client), false, job_secret()),
            Stream(std::move(sockets.server), true, job_secret())};
  const auto wait = [](const Stream& stream, Want want) {
    pollfd ready{stream.fd(), static_cast<short>(want == Want::write ? POLLOUT : POLLIN), 0};
    ::poll(&ready, 1, 10);
  };
  for (int i = 0; i < 1000; ++i) {
    const Io a = pair.client.handshake(), b = pair.server.handshake();
    CHECK(a.status.ok() && b.status.ok());
    if (a.want == Want::nothing && b.want == Want::nothing) return pair;
    if (a.want != Want::nothing) wait(pair.client, a.want);
    if (b.want != Want::nothing) wait(pair.server, b.want);
  }
  throw test::CheckFailed("no end of the handshake");
}

Io write_text(Stream& stream, std::string_view text, int pass_fd = -1) {
  const iovec part{const_cast<char*>(text.data()), text.size()};
  return stream.write(&part, 1, pass_fd);
}

std::string read_text(Stream& stream, std::vector<Fd>* fds = nullptr) {
  std::string out(1000, '\0');
  const iovec part{out.data(), out.size()};
  Io io;
  do {  // a part of a record is no text yet
    if (!stream.pending()) await(stream.fd(), POLLIN);
    io = stream.read(&part, 1, fds);
    CHECK(io.status.ok());
  } while (io.bytes == 0 && !io.closed);
  out.resize(io.bytes);
  return out;
}

Io read_end(Stream& stream) {
  char bytes[10];
  const iovec part{bytes, sizeof bytes};
  Io io;
  do {
    if (!stream.pending()) await(stream.fd(), POLLIN);
    io = stream.read(&part, 1);
    CHECK_EQ(io.bytes, 0u);
  } while (!io.closed);
  return io;
}

const std::vector<std::function<Pair()>>& every_kind() {
  static const std::vector<std::function<Pair()>> kinds{
      [] { return plain(unix_pair()); }, [] { return plain(tcp_pair()); }, [] { return tls(tcp_pair()); },
      [] { return tls(unix_pair()); }};
  return kinds;
}

// --- Bytes.

TEST(bytes_scatter_and_gather_over_every_kind) {
  std::mt19937_64 random(1);
  for (const auto& kind : every_kind()) {
    Pair pair = kind();
    Bytes sent(3'000'001), got(sent.size());
    for (auto& b : sent) b = static_cast<uint8_t>(random());
    const auto parts_of = [&](Bytes& bytes, size_t from) {
      std::vector<iovec> parts;
      // More parts than one system call takes, empty ones among them.
      for (int i = 0; i < 1500 && from < bytes.size(); ++i) {
        const size_t length = std::min<size_t>(random() % 700, bytes.size() - from);
        parts.push_back({bytes.data() + from, length});
        from += length;
      }
      return parts;
    };
    size_t num_sent = 0, num_got = 0;
    while (num_got < got.size()) {
      Io io;
      if (num_sent < sent.size()) {
        const auto parts = parts_of(sent, num_sent);
        io = pair.client.write(parts.data(), static_cast<int>(parts.size()));
        CHECK(io.status.ok() && (io.bytes > 0 || io.want == Want::write));
        num_sent += io.bytes;
      }
      const auto parts = parts_of(got, num_got);
      if (!pair.server.pending()) await(pair.server.fd(), POLLIN);
      io = pair.server.read(parts.data(), static_cast<int>(parts.size()));
      CHECK(io.status.ok() && (io.bytes > 0 || io.want == Want::read));
      num_got += io.bytes;
    }
    CHECK(got == sent);
  }
}

TEST(nothing_asked_is_not_the_end) {
  for (const auto& kind : every_kind()) {
    Pair pair = kind();
    CHECK_EQ(write_text(pair.client, "x").bytes, 1u);
    await(pair.server.fd(), POLLIN);
    const iovec empty[2] = {};
    for (int count = 0; count < 3; ++count) {
      const Io io = pair.server.read(empty, count);
      CHECK(io.bytes == 0 && !io.closed && io.status.ok());
      CHECK(!pair.client.write(empty, count).closed);
    }
    CHECK_EQ(read_text(pair.server), "x");
  }
}

TEST(an_idle_stream_says_what_to_wait_for) {
  for (const auto& kind : every_kind()) {
    Pair pair = kind();
    char byte;
    const iovec part{&byte, 1};
    const Io io = pair.client.read(&part, 1);
    CHECK(io.bytes == 0 && io.want == Want::read && !io.closed && io.status.ok());
  }
}

TEST(only_tls_has_a_binding) {
  Pair secure = tls(tcp_pair()), other = tls(tcp_pair()), open = plain(tcp_pair());
  CHECK(secure.client.is_tls() && !open.client.is_tls());
  CHECK(secure.client.binding("EXPORTER-x") == secure.server.binding("EXPORTER-x"));
  CHECK(secure.client.binding("EXPORTER-x") != other.client.binding("EXPORTER-x"));
  CHECK(open.client.binding("EXPORTER-x") == Digest{});
}

TEST(streams_move) {
  for (const auto& kind : every_kind()) {
    Pair pair = kind();
    Stream moved(std::move(pair.client));
    CHECK_EQ(pair.client.fd(), -1);
    pair.client = std::move(moved);
    CHECK_EQ(write_text(pair.client, "still works").bytes, 11u);
    CHECK_EQ(read_text(pair.server), "still works");
  }
}

// --- Ends.

TEST(an_orderly_end_is_no_failure_and_leaves_the_other_direction) {
  for (const auto& kind : every_kind()) {
    Pair pair = kind();
    CHECK_EQ(write_text(pair.client, "last words").bytes, 10u);
    pair.client.shutdown();
    CHECK_EQ(read_text(pair.server), "last words");
    const Io io = read_end(pair.server);
    CHECK(io.closed && io.status.ok());
    CHECK_EQ(write_text(pair.server, "answer").bytes, 6u);
    CHECK_EQ(read_text(pair.client), "answer");
    CHECK_EQ(write_text(pair.client, "more").status.kind, MR_PEER_LOST);
  }
}

TEST(writing_to_a_peer_that_is_gone_raises_no_signal) {
  for (const auto& kind : every_kind()) {
    Pair pair = kind();
    pair.server = Stream(Fd());
    Io io;
    // TCP learns of it with the first answer.
    for (int i = 0; i < 100 && !io.closed; ++i) {
      io = write_text(pair.client, "anyone?");
      pollfd ready{pair.client.fd(), POLLERR, 0};
      if (!io.closed) ::poll(&ready, 1, 100);
    }
    CHECK(io.closed);
    CHECK_EQ(io.status.kind, MR_PEER_LOST);
    CHECK(io.status.sys_errno == EPIPE || io.status.sys_errno == ECONNRESET);
  }
}

TEST(a_reset_is_a_lost_peer) {
  for (const bool with_tls : {false, true}) {
    Pair pair = with_tls ? tls(tcp_pair()) : plain(tcp_pair());
    const linger at_once{1, 0};
    CHECK_EQ(::setsockopt(pair.server.fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
    pair.server = Stream(Fd());
    const Io io = read_end(pair.client);
    CHECK(io.closed);
    CHECK_EQ(io.status.kind, MR_PEER_LOST);
    CHECK_EQ(io.status.sys_errno, ECONNRESET);
  }
}

// --- Descriptors that travel.

TEST(a_descriptor_travels_with_its_bytes) {
  Pair pair = plain(unix_pair());
  int ends[2];
  CHECK_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Fd read_end_of_pipe(ends[0]);
  Fd write_end_of_pipe(ends[1]);
  CHECK_EQ(write_text(pair.client, "here", write_end_of_pipe.get()).bytes, 4u);
  write_end_of_pipe.reset();
  std::vector<Fd> fds;
  CHECK_EQ(read_text(pair.server, &fds), "here");
  CHECK_EQ(fds.size(), 1u);
  CHECK((::fcntl(fds[0].get(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK_EQ(::write(fds[0].get(), "x", 1), 1);
  char byte = 0;
  CHECK_EQ(::read(read_end_of_pipe.get(), &byte, 1), 1);
  CHECK(byte == 'x');
}

TEST(descriptors_keep_their_order) {
  Pair pair = plain(unix_pair());
  std::vector<Fd> sent, got;
  for (int i = 0; i < 20; ++i) {
    sent.push_back(make_memfd("test", static_cast<uint64_t>(i + 1)));
    CHECK_EQ(write_text(pair.client, "frame", sent.back().get()).bytes, 5u);
    CHECK_EQ(write_text(pair.client, "without").bytes, 7u);
  }
  std::string text;
  while (text.size() < 20 * 12) text += read_text(pair.server, &got);
  CHECK_EQ(got.size(), 20u);
  for (int i = 0; i < 20; ++i) CHECK_EQ(::lseek(got[static_cast<size_t>(i)].get(), 0, SEEK_END), i + 1);
}

int num_open() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += ::fcntl(fd, F_GETFD) >= 0;
  return count;
}

void send_many(const Stream& stream, int fd, int number) {
  alignas(cmsghdr) char rights[CMSG_SPACE(100 * sizeof(int))] = {};
  char byte = 'x';
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = rights;
  message.msg_controllen = CMSG_SPACE(static_cast<size_t>(number) * sizeof(int));
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(static_cast<size_t>(number) * sizeof(int));
  for (int i = 0; i < number; ++i) std::memcpy(CMSG_DATA(header) + static_cast<size_t>(i) * sizeof fd, &fd, sizeof fd);
  CHECK_EQ(::sendmsg(stream.fd(), &message, MSG_NOSIGNAL), 1);
}

TEST(descriptors_nobody_wants_are_not_left_open) {
  Pair pair = plain(unix_pair());
  const Fd event = make_eventfd();
  const int before = num_open();
  CHECK_EQ(write_text(pair.client, "unwanted", event.get()).bytes, 8u);
  CHECK_EQ(read_text(pair.server), "unwanted");
  send_many(pair.client, event.get(), 100);
  CHECK_EQ(read_text(pair.server), "x");
  CHECK_EQ(num_open(), before);
  send_many(pair.client, event.get(), 100);
  std::vector<Fd> fds;
  CHECK_EQ(read_text(pair.server, &fds), "x");
  CHECK_EQ(fds.size(), static_cast<size_t>(Stream::kMaxFds));
  CHECK_EQ(num_open(), before + static_cast<int>(fds.size()));
  fds.clear();
  CHECK_EQ(num_open(), before);
}

TEST(without_room_for_a_descriptor_its_bytes_arrive_alone) {
  Pair pair = plain(unix_pair());
  const Fd event = make_eventfd();
  CHECK_EQ(write_text(pair.client, "bytes", event.get()).bytes, 5u);
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit full = before;
  full.rlim_cur = 3;
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &full), 0);
  char text[10];
  const iovec part{text, sizeof text};
  std::vector<Fd> fds;
  const Io io = pair.server.read(&part, 1, &fds);
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK(io.status.ok());
  CHECK_EQ(io.bytes, 5u);
  CHECK(fds.empty());
}

TEST(no_descriptor_travels_over_tls) {
  Pair pair = tls(tcp_pair());
  const Fd event = make_eventfd();
  CHECK_EQ(refused([&] { write_text(pair.client, "x", event.get()); }).kind, MR_CONFIG);
}

// --- Addresses.

TEST(addresses_are_read_and_written) {
  for (const char* text : {"127.0.0.1:0", "[::1]:65535", "10.1.2.3:80", "[fe80::1%eth0]:7", "node-7.cluster.local:5"})
    CHECK_EQ(HostPort::parse(text).text(), text);
  CHECK_EQ(HostPort::parse("[::1]:22").host, "::1");
  CHECK_EQ(HostPort::parse("[127.0.0.1]:22").text(), "127.0.0.1:22");
  CHECK_EQ(HostPort::parse("a:007").port, 7);
}

TEST(malformed_addresses_are_refused_by_name) {
  const std::string with_zero("a\0b:5", 5);
  for (const std::string& text : {std::string(),
                                  std::string("127.0.0.1"),
                                  std::string(":5"),
                                  std::string("[]:5"),
                                  std::string("::1"),
                                  std::string("::1:5"),
                                  std::string("[::1]"),
                                  std::string("[::1:5"),
                                  std::string("h:"),
                                  std::string("h:x"),
                                  std::string("h:65536"),
                                  std::string("h:-1"),
                                  std::string("h:+1"),
                                  std::string("h: 1"),
                                  std::string("h:1 "),
                                  std::string("a b:5"),
                                  std::string("a/b:5"),
                                  std::string("[[::1]]:5"),
                                  std::string("h:99999999999999999999"),
                                  with_zero}) {
    const Status status = refused([&] { HostPort::parse(text); });
    CHECK_EQ(status.kind, MR_CONFIG);
    CHECK(mentions(status, "'" + text + "'"));
  }
}

bool has_ipv6() {
  try {
    tcp_listen({"::1", 0}, 0, 6, nullptr);
    return true;
  } catch (const Error&) {
    return false;
  }
}

TEST(both_families_connect) {
  for (const std::string host : {"127.0.0.1", "::1"}) {
    if (host == "::1" && !has_ipv6()) continue;
    Pair pair = plain(tcp_pair(host));
    CHECK_EQ(write_text(pair.client, "hello").bytes, 5u);
    CHECK_EQ(read_text(pair.server), "hello");
  }
}

TEST(every_address_means_both_families) {
  HostPort bound;
  const Fd listener = tcp_listen({"", 0}, 0, 0, &bound);
  CHECK(bound.port != 0);
  CHECK_EQ(bound.host, has_ipv6() ? "::" : "0.0.0.0");
  for (const std::string host : {"127.0.0.1", "::1"}) {
    if (host == "::1" && !has_ipv6()) continue;
    const Fd client = tcp_connect_start({host, bound.port}, 0);
    accept_one(listener);
  }
  HostPort only_4;
  tcp_listen({"", 0}, 0, 4, &only_4);
  CHECK_EQ(only_4.host, "0.0.0.0");
  if (!has_ipv6()) return;
  HostPort only_6;
  const Fd listener_6 = tcp_listen({"", 0}, 0, 6, &only_6);
  CHECK_EQ(only_6.host, "::");
  // Its port is free for IPv4.
  const Fd beside = tcp_listen({"0.0.0.0", only_6.port}, only_6.port, 4, nullptr);
  CHECK(beside.valid());
}

TEST(names_resolve_off_the_loop_only) {
  HostPort bound;
  const Fd listener = tcp_listen({"localhost", 0}, 0, 4, &bound);
  CHECK_EQ(bound.host, "127.0.0.1");
  CHECK_EQ((HostPort{"localhost", 80}.resolve(4).text()), "127.0.0.1:80");
  CHECK_EQ((HostPort{"127.0.0.1", 80}.resolve(0).text()), "127.0.0.1:80");
  const Status status = refused([&] { tcp_connect_start({"localhost", bound.port}, 0); });
  CHECK_EQ(status.kind, MR_CONFIG);
  CHECK(mentions(status, "'localhost'"));
}

TEST(unknown_hosts_are_named) {
  for (const auto& body :
       std::vector<std::function<void()>>{[] { tcp_listen({"no-such-host.invalid", 0}, 0, 0, nullptr); },
                                          [] { HostPort{"no-such-host.invalid", 1}.resolve(0); },
                                          [] { tcp_connect_start({"no-such-host.invalid", 1}, 0); }}) {
    const Status status = refused(body);
    CHECK_EQ(status.kind, MR_CONFIG);
    CHECK(mentions(status, "no-such-host.invalid"));
  }
  const Status family = refused([] { HostPort{"127.0.0.1", 1}.resolve(6); });
  CHECK_EQ(family.kind, MR_CONFIG);
  CHECK(mentions(family, "IPv6") && mentions(family, "127.0.0.1"));
  CHECK(mentions(refused([] { HostPort{"127.0.0.1", 1}.resolve(5); }), "5"));
}

TEST(addresses_of_other_hosts_can_not_be_listened_on) {
  const Status status = refused([] { tcp_listen({"192.0.2.1", 0}, 0, 0, nullptr); });
  CHECK_EQ(status.kind, MR_CONFIG);
  CHECK(mentions(status, "192.0.2.1"));
}

TEST(port_ranges_are_kept_to) {
  // Three free neighbours, found by trying.
  for (uint16_t first = 20000; first < 60000; first = static_cast<uint16_t>(first + 7)) {
    const auto last = static_cast<uint16_t>(first + 2);
    std::vector<Fd> listeners;
    std::vector<uint16_t> ports;
    Status full;
    try {
      while (listeners.size() < 10) {
        HostPort bound;
        listeners.push_back(tcp_listen({"127.0.0.1", first}, last, 0, &bound));
        ports.push_back(bound.port);
      }
    } catch (const Error& error) {
      full = error.status();
    }
    if (listeners.size() != 3) continue;  // someone else has one of them
    CHECK(ports == (std::vector<uint16_t>{first, static_cast<uint16_t>(first + 1), last}));
    CHECK_EQ(full.kind, MR_RESOURCE_EXHAUSTED);
    CHECK(mentions(full, std::to_string(first)) && mentions(full, std::to_string(last)));
    CHECK(mentions(full, "127.0.0.1"));
    listeners[1].reset();
    HostPort again;
    const Fd fd = tcp_listen({"127.0.0.1", first}, last, 0, &again);
    CHECK_EQ(again.port, first + 1);
    return;
  }
  CHECK(false);
}

TEST(the_last_port_is_the_end_of_its_range) {
  try {
    HostPort bound;
    const Fd fd = tcp_listen({"127.0.0.1", 65535}, 65535, 0, &bound);
    CHECK_EQ(bound.port, 65535);
  } catch (const Error& error) {
    CHECK_EQ(error.status().kind, MR_RESOURCE_EXHAUSTED);
  }
}

TEST(an_empty_port_range_is_refused) {
  const Status status = refused([] { tcp_listen({"127.0.0.1", 5001}, 5000, 0, nullptr); });
  CHECK_EQ(status.kind, MR_CONFIG);
  CHECK(mentions(status, "5001") && mentions(status, "5000"));
}

TEST(nobody_there_is_a_lost_peer) {
  HostPort bound;
  tcp_listen({"127.0.0.1", 0}, 0, 0, &bound);  // and closed again
  Status status;
  try {
    const Fd fd = tcp_connect_start(bound, 0);
    await(fd.get(), POLLOUT);
    CHECK_EQ(socket_error(fd.get()), ECONNREFUSED);
  } catch (const Error& error) {
    CHECK_EQ(error.status().kind, MR_PEER_LOST);
    CHECK_EQ(error.status().sys_errno, ECONNREFUSED);
  }
  status = refused([] { unix_connect_start(unique_name()); });
  CHECK_EQ(status.kind, MR_PEER_LOST);
  CHECK_EQ(status.sys_errno, ECONNREFUSED);
}

TEST(unix_names_are_taken_once_and_have_a_limit) {
  const std::string name = unique_name();
  Fd listener = unix_listen(name);
  const Status taken = refused([&] { unix_listen(name); });
  CHECK_EQ(taken.kind, MR_RESOURCE_EXHAUSTED);
  CHECK(mentions(taken, name));
  listener.reset();
  listener = unix_listen(name);  // nothing is left behind
  unix_listen(std::string(107, 'n'));
  for (const std::string& bad : {std::string(), std::string(108, 'n')}) {
    CHECK_EQ(refused([&] { unix_listen(bad); }).kind, MR_CONFIG);
    CHECK_EQ(refused([&] { unix_connect_start(bad); }).kind, MR_CONFIG);
  }
}

TEST(a_full_unix_queue_says_try_later) {
  const std::string name = unique_name();
  const Fd listener = unix_listen(name);
  CHECK_EQ(::listen(listener.get(), 1), 0);
  std::vector<Fd> clients;
  Status status;
  while (status.ok() && clients.size() < 10) {
    try {
      clients.push_back(unix_connect_start(name));
    } catch (const Error& error) {
      status = error.status();
    }
  }
  CHECK_EQ(status.kind, MR_RESOURCE_EXHAUSTED);
  CHECK_EQ(status.sys_errno, EAGAIN);
  accept_one(listener);
  clients.push_back(unix_connect_start(name));
}

int option_of(const Fd& fd, int level, int name) {
  int value = -1;
  socklen_t length = sizeof value;
  CHECK_EQ(::getsockopt(fd.get(), level, name, &value, &length), 0);
  return value;
}

TEST(tcp_sockets_are_tuned) {
  Sockets sockets = tcp_pair();
  tune_tcp(sockets.client.get(), 2.5);
  CHECK(option_of(sockets.client, IPPROTO_TCP, TCP_NODELAY) != 0);
  CHECK(option_of(sockets.client, SOL_SOCKET, SO_KEEPALIVE) != 0);
  CHECK_EQ(option_of(sockets.client, IPPROTO_TCP, TCP_USER_TIMEOUT), 2500);
  tune_tcp(sockets.server.get(), -1);
  CHECK(option_of(sockets.server, IPPROTO_TCP, TCP_NODELAY) != 0);
  CHECK_EQ(option_of(sockets.server, IPPROTO_TCP, TCP_USER_TIMEOUT), 0);
  tune_tcp(sockets.server.get(), 1e300);
  CHECK(option_of(sockets.server, IPPROTO_TCP, TCP_USER_TIMEOUT) > 0);
}

TEST(interfaces_have_addresses) {
  CHECK_EQ(interface_address("lo", 0), "127.0.0.1");
  CHECK_EQ(interface_address("lo", 4), "127.0.0.1");
  CHECK_EQ(interface_address("no-such-interface", 0), "");
  CHECK_EQ(interface_address("127.0.0.1", 0), "");
  if (has_ipv6()) {
    CHECK_EQ(interface_address("lo", 6), "::1");
  } else {
    const Status status = refused([] { interface_address("lo", 6); });
    CHECK_EQ(status.kind, MR_CONFIG);
    CHECK(mentions(status, "lo") && mentions(status, "IPv6"));
  }
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
