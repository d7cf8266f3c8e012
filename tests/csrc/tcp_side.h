// Two sides of a tcp lane in one process, for its tests: each has a loop, regions, a data listener and a link; control
// frames between them are passed as tasks of the loops. In between may stand a Proxy, which can stop, cut and change
// what the data sockets carry.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <condition_variable>
#include <list>
#include <thread>

#include "link_host.h"

namespace mr::test {

class TcpSide final : public TestHost, private Loop::Watcher {
 public:
  explicit TcpSide(std::string name, const mr_options& options) : TestHost(name, options), name_(std::move(name)) {
    listener_ = tcp_listen({"127.0.0.1", 0}, 0, 4, &at_);
  }
  ~TcpSide() {
    close(fail(MR_PEER_LOST, "this side ends"));
    loop_.stop();
  }

  // `there` is where the other side's data sockets are accepted: its listener or a proxy. Both sides, then begin.
  void meet(TcpSide& other, const HostPort& there) {
    other_ = &other;
    info_.name = other.name_;
    info_.tcp = {there};
    info_.bulk_tls = other.options_.raw.bulk_tls != 0;
  }
  // More places to look, after the one it met at; and whether it may be on this host.
  void look_also_at(const HostPort& there) { info_.tcp.push_back(there); }
  void look_only_at(const HostPort& there, const std::string& boot_id) {
    info_.tcp = {there};
    info_.boot_id = boot_id;
  }
  void begin() {
    on_loop([this] {
      link_ = make_tcp(*this);
      door_ = make_data_door(loop_, options_, [this](uint64_t session) {
        const bool known = session == other_->session_ && Clock::now() >= sessions_from_;
        return known ? DataDoor::Session{link_, other_->key_} : DataDoor::Session{};
      });
      loop_.watch_on_loop(listener_.get(), EPOLLIN, this);
    });
  }
  void close(const Status& why) {
    on_loop([&] {
      if (!link_ || std::exchange(closed_, true)) return;
      loop_.unwatch_on_loop(listener_.get());
      door_->close_on_loop();
      link_->close_on_loop(why);
    });
  }

  const HostPort& at() const { return at_; }
  Link& link() { return *link_; }
  DataDoor& door() { return *door_; }
  uint64_t session() const { return session_; }
  const Digest& key() const { return key_; }
  void set_key(const Digest& key) { key_ = key; }  // so that the two sides disagree
  void set_session(uint64_t session) { session_ = session; }
  void know_sessions_from(Time when) { sessions_from_ = when; }  // before begin()

  RemoteRegion share(void* base, uint64_t size, uint32_t access = MR_READ | MR_WRITE) {
    const RegionRef region = regions_.create(base, size, access);
    RemoteRegion out;
    out.name = {region->id, region->key};
    out.size = size;
    out.access = access;
    return out;
  }
  void drop(const RemoteRegion& region) {
    on_loop([&] {
      if (const RegionRef ended = regions_.end_access(region.name.id)) regions_.release(ended);
    });
  }

  OpRef start(Verb verb, const RemoteRegion& remote, const View& remote_view, void* local, const View& local_view,
              const BlockSums& sums = {}) {
    auto op = std::make_shared<Op>();
    op->verb = verb;
    op->remote = std::make_shared<const RemoteRegion>(remote);
    op->remote_view = remote_view;
    op->local = static_cast<uint8_t*>(local);
    op->local_view = local_view;
    op->block_sums = sums;
    op->peer_name = info_.name;
    op->loop = std::shared_ptr<Loop>(std::shared_ptr<void>(), &loop_);  // who waits may lead it
    op->submitted = Clock::now();
    ++begun_;
    loop_.run([this, op] { link_->start_on_loop(op); });
    return op;
  }
  OpRef read(const RemoteRegion& remote, uint64_t offset, void* local, uint64_t length, const BlockSums& sums = {}) {
    return start(Verb::read, remote, View::contiguous(offset, length), local, View::contiguous(0, length), sums);
  }
  OpRef write(const RemoteRegion& remote, uint64_t offset, const void* local, uint64_t length) {
    return start(Verb::write, remote, View::contiguous(offset, length), const_cast<void*>(local),
                 View::contiguous(0, length));
  }
  void stop(const OpRef& op, int kind) {
    op->stop_kind = kind;
    on_loop([&] { link_->stop_on_loop(op); });
  }

  // LinkHost
  void send_on_loop(uint16_t type, Bytes payload, const Fd*) override {
    if (closed_) return;
    other_->loop_.post([other = other_, type, payload = std::move(payload)] {
      Reader in(payload);
      std::vector<Fd> fds;
      Reply none;
      if (!other->closed_) other->link_->on_frame_on_loop(type, in, fds, none);
    });
  }
  void request_on_loop(uint16_t type, Bytes payload, std::function<void(Reply)> on_reply) override {
    count("requests", 1);
    other_->loop_.post([this, type, payload = std::move(payload), on_reply = std::move(on_reply)] {
      auto reply = std::make_shared<Reply>();
      try {
        Reader in(payload);
        std::vector<Fd> fds;
        other_->link_->on_frame_on_loop(type, in, fds, *reply);
      } catch (const Error& error) {
        reply->status = error.status();
      }
      loop_.post([on_reply, reply] { on_reply(std::move(*reply)); });
    });
  }

 private:
  void on_event(uint32_t) override {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) return;
    tune_tcp(socket.get(), options_.raw.heartbeat_timeout);
    door_->accept_on_loop(std::move(socket));
  }

  const std::string name_;
  TcpSide* other_ = nullptr;
  Fd listener_;
  HostPort at_;
  std::shared_ptr<Link> link_;
  std::unique_ptr<DataDoor> door_;
  Time sessions_from_{};
  bool closed_ = false;
};

// Forwards each connection to `to`. Directions: up is from the client to the server, down the other way.
class Proxy {
 public:
  enum Direction { up = 0, down = 1 };
  static constexpr uint64_t kUnlimited = ~0ull;

  explicit Proxy(const HostPort& to) : to_(to), wake_(make_eventfd()) {
    listener_ = tcp_listen({"127.0.0.1", 0}, 0, 4, &at_);
    thread_ = std::thread([this] { forward(); });
  }
  ~Proxy() {
    stopping_ = true;
    poke();
    thread_.join();
  }

  const HostPort& at() const { return at_; }
  // Lets so many more bytes pass in that direction, all connections together.
  void allow(Direction direction, uint64_t bytes) {
    {
      std::lock_guard guard(lock_);
      allowed_[direction] = bytes;
    }
    poke();
  }
  // Waits until the allowance is used up; true if it is.
  bool await_stall(Direction direction) {
    std::unique_lock guard(lock_);
    return changed_.wait_for(guard, std::chrono::seconds(60), [&] { return allowed_[direction] == 0; });
  }
  // Cuts all connections. Returns when they are.
  void cut() {
    std::unique_lock guard(lock_);
    cut_ = true;
    poke();
    changed_.wait(guard, [&] { return !cut_; });
  }
  // The same at the server's side only: the client hears nothing more, not even the end.
  void cut_far_side() {
    {
      std::lock_guard guard(lock_);
      half_ = true;
    }
    cut();
  }
  // Flips a bit of byte `at` of each connection from now on.
  void corrupt(Direction direction, uint64_t at) {
    std::lock_guard guard(lock_);
    corrupt_[direction] = at;
  }
  void stop_corrupting() {
    std::lock_guard guard(lock_);
    corrupt_[up] = corrupt_[down] = kUnlimited;
  }
  uint64_t connections() {
    std::lock_guard guard(lock_);
    return connections_;
  }
  // What the first connection's client said first.
  Bytes recorded(size_t length) {
    std::unique_lock guard(lock_);
    changed_.wait_for(guard, std::chrono::seconds(60), [&] { return recorded_.size() >= length; });
    return {recorded_.begin(), recorded_.begin() + static_cast<ptrdiff_t>(std::min(length, recorded_.size()))};
  }

 private:
  struct Way {
    Bytes buffer;
    size_t sent = 0;
    uint64_t passed = 0;
  };
  struct Connection {
    Fd ends[2];  // ends[direction] is where that direction's bytes come from
    Way ways[2];
    uint64_t number = 0;
  };

  void poke() {
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);
  }

  void forward() {
    while (!stopping_) {
      std::vector<pollfd> polled{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      {
        std::lock_guard guard(lock_);
        for (auto& connection : connections_list_)
          for (int d : {0, 1}) {
            const bool may_read = connection.ways[d].buffer.empty() && allowed_[d] > 0;
            const bool must_write = !connection.ways[1 - d].buffer.empty();
            polled.push_back(
                {connection.ends[d].get(), short((may_read ? POLLIN : 0) | (must_write ? POLLOUT : 0)), 0});
          }
      }
      ::poll(polled.data(), polled.size(), -1);
      uint64_t ignored;
      if (polled[0].revents != 0) (void)!::read(wake_.get(), &ignored, sizeof ignored);
      std::lock_guard guard(lock_);
      if (cut_ && half_)
        for (auto& connection : connections_list_) silent_.push_back(std::move(connection.ends[up]));
      if (cut_) connections_list_.clear();
      cut_ = half_ = false;
      connections_list_.remove_if([this](Connection& connection) { return !move(connection); });
      if (polled[1].revents != 0) accept();
      changed_.notify_all();
    }
  }

  void accept() {
    Fd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!client.valid()) return;
    Fd server(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(to_.port);
    ::inet_pton(AF_INET, to_.host.c_str(), &address.sin_addr);
    if (::connect(server.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return;
    tune_tcp(client.get(), 0);
    tune_tcp(server.get(), 0);
    Connection& connection = connections_list_.emplace_back();
    connection.ends[up] = std::move(client);
    connection.ends[down] = std::move(server);
    connection.number = connections_++;
  }

  // False once the connection has ended.
  bool move(Connection& connection) {
    for (int d : {0, 1}) {
      Way& way = connection.ways[d];
      if (way.buffer.empty() && allowed_[d] > 0) {
        way.buffer.resize(std::min<uint64_t>(64 << 10, allowed_[d]));
        const ssize_t got = ::recv(connection.ends[d].get(), way.buffer.data(), way.buffer.size(), MSG_DONTWAIT);
        way.buffer.resize(got > 0 ? static_cast<size_t>(got) : 0);
        way.sent = 0;
        if (got == 0 || (got < 0 && errno != EAGAIN)) return false;
        if (got > 0) pass(connection, d, static_cast<uint64_t>(got));
      }
      if (!way.buffer.empty()) {
        const ssize_t put = ::send(connection.ends[1 - d].get(), way.buffer.data() + way.sent,
                                   way.buffer.size() - way.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (put < 0 && errno != EAGAIN) return false;
        if (put > 0) way.sent += static_cast<size_t>(put);
        if (way.sent == way.buffer.size()) way.buffer.clear();
      }
    }
    return true;
  }

  void pass(Connection& connection, int d, uint64_t got) {
    Way& way = connection.ways[d];
    if (allowed_[d] != kUnlimited) allowed_[d] -= got;
    if (corrupt_[d] >= way.passed && corrupt_[d] < way.passed + got) way.buffer[corrupt_[d] - way.passed] ^= 0x10;
    if (d == up && connection.number == 0 && recorded_.size() < 4096)
      recorded_.insert(recorded_.end(), way.buffer.begin(), way.buffer.end());
    way.passed += got;
  }

  const HostPort to_;
  HostPort at_;
  Fd wake_, listener_;
  std::atomic<bool> stopping_{false};
  std::mutex lock_;
  std::condition_variable changed_;
  std::list<Connection> connections_list_;
  uint64_t allowed_[2] = {kUnlimited, kUnlimited}, corrupt_[2] = {kUnlimited, kUnlimited};
  uint64_t connections_ = 0;
  bool cut_ = false, half_ = false;
  std::list<Fd> silent_;
  Bytes recorded_;
  std::thread thread_;
};

// A reader or writer and an owner, with a proxy on the way from the first to the second.
struct TcpPair {
  explicit TcpPair(const mr_options& options = Options::defaults()) : TcpPair(options, options) {}
  TcpPair(const mr_options& user_options, const mr_options& owner_options)
      : user("user", user_options), owner("owner", owner_options), proxy(owner.at()) {
    user.meet(owner, proxy.at());
    owner.meet(user, user.at());
  }
  TcpPair& begin() {
    owner.begin();
    user.begin();
    return *this;
  }
  ~TcpPair() {
    user.close(fail(MR_PEER_LOST, "the test ends"));
    owner.close(fail(MR_PEER_LOST, "the test ends"));
  }

  TcpSide user, owner;
  Proxy proxy;
};

}  // namespace mr::test
