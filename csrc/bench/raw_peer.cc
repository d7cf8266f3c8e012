#include "raw_peer.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <future>

#include "failure.h"
#include "raw_socket.h"

namespace mr::bench {
namespace {

enum class Command : uint32_t { kTcpEcho, kUnixEcho, kSendStream, kReceiveStream };

struct Order {
  Command command;
  uint32_t streams;
  uint64_t request, reply, count;
};

// Runs part(socket, data, length) for each socket on a thread of its own; throws what any of them threw.
template <typename Part>
void split(const int* sockets, uint32_t streams, uint8_t* data, uint64_t bytes, Part part) {
  std::vector<std::future<void>> parts;
  for (uint32_t i = 0; i < streams; ++i) {
    uint64_t start = bytes * i / streams, end = bytes * (i + 1) / streams;
    auto policy = i + 1 < streams ? std::launch::async : std::launch::deferred;  // the last one runs in get()
    parts.push_back(std::async(policy, part, sockets[i], data + start, end - start));
  }
  parts.back().get();
  parts.pop_back();
  for (auto& other : parts) other.get();
}

void send_part(int fd, uint8_t* data, uint64_t size) { send_all(fd, data, size); }
void receive_part(int fd, uint8_t* data, uint64_t size) {
  if (size > 0 && !receive_all(fd, data, size)) throw Failure("the raw peer ended");
}

void grow(Buffer& buffer, uint64_t size) {
  if (buffer.size() < size) buffer = Buffer::touched(size);
}

struct PeerEnds {
  int control, local, tcp[RawPeer::kMaxStreams];
};

void obey(const Order& order, const PeerEnds& ends, Buffer& buffer) {
  grow(buffer, std::max(order.request, order.reply));
  uint8_t* data = buffer.data();
  switch (order.command) {
    case Command::kTcpEcho:
      for (uint64_t i = 0; i < order.count; ++i) {
        receive_part(ends.tcp[0], data, order.request);
        send_all(ends.tcp[0], data, order.reply);
      }
      return;
    case Command::kUnixEcho: {
      EpollEnd end(ends.local);
      for (uint64_t i = 0; i < order.count; ++i) {
        end.receive(data, order.request);
        end.send(data, order.reply);
      }
      return;
    }
    case Command::kSendStream:
      return split(ends.tcp, order.streams, data, order.request, send_part);
    case Command::kReceiveStream:
      split(ends.tcp, order.streams, data, order.request, receive_part);
      return send_all(ends.control, data, 1);
  }
}

[[noreturn]] void be_the_peer(const PeerEnds& ends, pid_t parent, int cpu) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  try {
    pin_to(cpu);
    Buffer buffer;
    for (Order order; receive_all(ends.control, reinterpret_cast<uint8_t*>(&order), sizeof order);)
      obey(order, ends, buffer);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "transport_bench: raw peer: %s\n", e.what());
    _exit(1);
  }
  _exit(0);
}

void order_peer(int control, const Order& order) {
  send_all(control, reinterpret_cast<const uint8_t*>(&order), sizeof order);
}

// Round trips in batches: the peer is told how many will come.
template <typename RoundTrip>
void batches(const Turn& turn, std::vector<double>& samples, RoundTrip batch) {
  double end = now() + turn.seconds;
  uint64_t done = 0, count = std::min<uint64_t>(turn.operations, 16);
  do {
    double started = now();
    batch(count, samples);
    done += count;
    double each = std::max((now() - started) / static_cast<double>(count), 1e-9);
    double fitting = std::clamp((end - now()) / each, 1.0, 4096.0);
    count = std::min(static_cast<uint64_t>(fitting), turn.operations - done);
  } while (now() < end && done < turn.operations);
}

}  // namespace

RawPeer::RawPeer(int cpu) {
  SocketPair control = unix_pair(SOCK_STREAM), local = unix_pair(SOCK_STREAM), tcp[kMaxStreams];
  for (auto& pair : tcp) pair = loopback_tcp_pair();
  pid_t parent = getpid();
  std::fflush(nullptr);
  pid_ = fork();
  if (pid_ < 0) throw_errno("fork");
  bool peer = pid_ == 0;
  auto keep = [peer](const SocketPair& pair) {
    close(peer ? pair.here : pair.there);
    return peer ? pair.there : pair.here;
  };
  control_ = keep(control);
  unix_ = keep(local);
  for (uint32_t i = 0; i < kMaxStreams; ++i) tcp_[i] = keep(tcp[i]);
  if (peer) be_the_peer({control_, unix_, {tcp_[0], tcp_[1], tcp_[2], tcp_[3]}}, parent, cpu);
}

RawPeer::~RawPeer() {
  kill(pid_, SIGKILL);  // it holds nothing, and may wait for data that will not come
  close(control_);
  close(unix_);
  for (int fd : tcp_) close(fd);
  waitpid(pid_, nullptr, 0);
}

void RawPeer::tcp_ping_pong(uint64_t request, uint64_t reply, const Turn& turn, std::vector<double>& samples) {
  grow(buffer_, std::max(request, reply));
  batches(turn, samples, [&](uint64_t count, std::vector<double>& out) {
    order_peer(control_, {Command::kTcpEcho, 1, request, reply, count});
    for (uint64_t i = 0; i < count; ++i) {
      double started = now();
      send_all(tcp_[0], buffer_.data(), request);
      receive_part(tcp_[0], buffer_.data(), reply);
      out.push_back(now() - started);
    }
  });
}

void RawPeer::unix_ping_pong(uint64_t size, const Turn& turn, std::vector<double>& samples) {
  grow(buffer_, size);
  EpollEnd end(unix_);
  batches(turn, samples, [&](uint64_t count, std::vector<double>& out) {
    order_peer(control_, {Command::kUnixEcho, 1, size, size, count});
    for (uint64_t i = 0; i < count; ++i) {
      double started = now();
      end.send(buffer_.data(), size);
      end.receive(buffer_.data(), size);
      out.push_back(now() - started);
    }
  });
}

double RawPeer::stream(uint64_t bytes, uint32_t streams, bool to_peer) {
  grow(buffer_, bytes);
  double started = now();
  order_peer(control_, {to_peer ? Command::kReceiveStream : Command::kSendStream, streams, bytes, 0, 0});
  split(tcp_, streams, buffer_.data(), bytes, to_peer ? send_part : receive_part);
  if (uint8_t done; to_peer) receive_part(control_, &done, 1);
  return now() - started;
}

}  // namespace mr::bench
