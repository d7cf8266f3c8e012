// The wire between the fake fabrics of several processes: who serves a queue pair is told by the upper bits of its
// number, and listens on an abstract Unix socket. One request at a time goes to each process.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <map>
#include <string>

#include "fake_verbs.h"

namespace mr::test {

class FakeWire {
 public:
  static constexpr uint32_t kPairBits = 12;  // queue pairs of one process

  // Joins the processes of the same name. Its threads serve until the process ends.
  FakeWire(FakeFabric& fabric, std::string name) : fabric_(fabric), name_(std::move(name)) {
    listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    for (place_ = 1; place_ < kPlaces && !bind_to(place_); ++place_) continue;
    if (place_ == kPlaces || ::listen(listener_, 64) != 0) throw std::runtime_error("no place on the fake wire");
    fabric_.join(place_ << kPairBits, [this](const auto& packet, auto& data) { return send(packet, data); });
    start([this] { accept_peers(); });
  }

 private:
  using Packet = FakeFabric::Packet;
  static constexpr uint32_t kPlaces = 1u << (24 - kPairBits);
  static constexpr int kPatience = 5000;  // milliseconds for an answer

  struct Answer {
    ibv_wc_status status = IBV_WC_RETRY_EXC_ERR;
    uint64_t length = 0;
  };

  sockaddr_un address(uint32_t place, socklen_t* length) const {
    sockaddr_un out{};
    out.sun_family = AF_UNIX;
    const std::string path = "fake-verbs-" + name_ + "-" + std::to_string(place);
    std::memcpy(out.sun_path + 1, path.data(), std::min(path.size(), sizeof out.sun_path - 1));
    *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
    return out;
  }
  bool bind_to(uint32_t place) const {
    socklen_t length = 0;
    const sockaddr_un where = address(place, &length);
    return ::bind(listener_, reinterpret_cast<const sockaddr*>(&where), length) == 0;
  }
  int connect_to(uint32_t place) const {
    socklen_t length = 0;
    const sockaddr_un where = address(place, &length);
    const int peer = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(peer, reinterpret_cast<const sockaddr*>(&where), length) == 0) return peer;
    ::close(peer);
    return -1;
  }

  // Signals are for the program's own threads.
  template <typename Body>
  static void start(Body body) {
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(body).detach();
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // All of it, or false: the other process is gone, or has stopped.
  static bool put(int peer, const void* data, size_t length) {
    for (const char* at = static_cast<const char*>(data); length > 0;) {
      const ssize_t sent = ::send(peer, at, length, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += sent;
      length -= static_cast<size_t>(sent);
    }
    return true;
  }
  static bool get(int peer, void* data, size_t length, int patience) {
    for (char* at = static_cast<char*>(data); length > 0;) {
      pollfd waits{peer, POLLIN, 0};
      if (::poll(&waits, 1, patience) <= 0) return false;
      const ssize_t got = ::recv(peer, at, length, 0);
      if (got <= 0) return false;
      at += got;
      length -= static_cast<size_t>(got);
    }
    return true;
  }

  void accept_peers() {
    for (int peer; (peer = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;)
      start([this, peer] { serve(peer); });
  }
  void serve(int peer) {
    Packet packet;
    std::vector<uint8_t> data;
    while (get(peer, &packet, sizeof packet, -1)) {
      data.resize(packet.opcode == IBV_WR_RDMA_WRITE ? packet.length : 0);
      if (!get(peer, data.data(), data.size(), -1)) break;
      Answer answer;
      answer.status = fabric_.serve(packet, data);
      answer.length = packet.opcode == IBV_WR_RDMA_WRITE ? 0 : data.size();
      if (!put(peer, &answer, sizeof answer) || !put(peer, data.data(), answer.length)) break;
    }
    ::close(peer);
  }

  // On the fabric's thread. A socket that has failed may hold half an answer: it is closed.
  ibv_wc_status send(const Packet& packet, std::vector<uint8_t>& data) {
    const uint32_t place = packet.to >> kPairBits;
    auto found = peers_.find(place);
    if (found == peers_.end()) found = peers_.emplace(place, connect_to(place)).first;
    const int peer = found->second;
    Answer answer;
    if (peer >= 0 && put(peer, &packet, sizeof packet) && put(peer, data.data(), data.size()) &&
        get(peer, &answer, sizeof answer, kPatience)) {
      data.resize(answer.length);
      if (get(peer, data.data(), data.size(), kPatience)) return answer.status;
    }
    if (peer >= 0) ::close(peer);
    peers_.erase(found);
    return IBV_WC_RETRY_EXC_ERR;
  }

  FakeFabric& fabric_;
  const std::string name_;
  int listener_ = -1;
  uint32_t place_ = 0;
  std::map<uint32_t, int> peers_;  // sockets, by place
};

}  // namespace mr::test
