#include "listener.h"

#include <sys/socket.h>

namespace mr {
namespace {

constexpr size_t kMaxGreeting = 256;
constexpr int kAcceptsPerEvent = 64;
constexpr double kPauseWithoutDescriptors = 0.1, kPauseWhenFull = 0.05;
constexpr double kPatience = 1.0;  // a greeting younger than this is not put out for a newcomer

}  // namespace

struct Listener::Door : Loop::Watcher {
  Door(Listener& listener, Fd fd) : listener(listener), fd(std::move(fd)) {}
  void on_event(uint32_t) override { listener.accept_on_loop(*this); }

  Listener& listener;
  Fd fd;
  bool is_unix = false, is_data = false;
};

Listener::Listener(Loop& loop, const Options& options, const PeerInfo& self, Strangers& strangers)
    : loop_(loop), options_(options), self_(self), strangers_(strangers) {
  const auto& raw = options.raw;
  const std::string by_interface = interface_address(options.listen_host, static_cast<int>(raw.ip_family));
  const std::string host = by_interface.empty() ? options.listen_host : by_interface;
  const auto listen_tcp = [&](HostPort& at, bool is_data) {
    auto door = std::make_unique<Door>(
        *this, tcp_listen({host, static_cast<uint16_t>(raw.port_min)}, static_cast<uint16_t>(raw.port_max),
                          static_cast<int>(raw.ip_family), &at));
    door->is_data = is_data;
    doors_.push_back(std::move(door));
    // Peers connect from their loops, which never wait for a name server.
    if (!options.advertise_host.empty())
      at.host = HostPort{options.advertise_host, 0}.resolve(static_cast<int>(raw.ip_family)).host;
  };
  listen_tcp(control_at_, false);
  if (options.allows("tcp")) listen_tcp(data_at_, true);
  if (raw.same_host_unix != 0) {
    unix_name_ = random_unix_name();
    const auto listen_unix = [&](Fd socket) {
      doors_.push_back(std::make_unique<Door>(*this, std::move(socket)));
      doors_.back()->is_unix = true;
    };
    listen_unix(unix_listen(unix_name_));
    if (!options.unix_socket_dir.empty()) {
      socket_file_ = std::make_unique<SocketFile>(options.unix_socket_dir, unix_name_);
      listen_unix(socket_file_->take_socket());
    }
  }
}

Listener::~Listener() = default;

void Listener::start_on_loop(Arrived arrived, DataDoor::Find find) {
  arrived_ = std::move(arrived);
  data_door_ = make_data_door(loop_, options_, std::move(find), [this](const std::string& from, const Status& why) {
    strangers_.refused_on_loop(from, why);
  });
  for (auto& door : doors_) loop_.watch_on_loop(door->fd.get(), EPOLLIN, door.get());
}

void Listener::accept_on_loop(Door& door) {
  for (int i = 0; i < kAcceptsPerEvent; ++i) {
    if (!door.is_data && !make_room_on_loop(door)) return pause_on_loop(door, kPauseWhenFull);
    Fd fd(::accept4(door.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
      return pause_on_loop(door, kPauseWithoutDescriptors);
    }
    if (door.is_data) {
      tune_tcp(fd.get(), options_.raw.heartbeat_timeout);
      data_door_->accept_on_loop(std::move(fd));
      continue;
    }
    if (!door.is_unix) tune_tcp(fd.get(), options_.raw.heartbeat_timeout);
    const std::string from = door.is_unix ? "" : peer_host(fd.get());
    auto stream = std::make_shared<ControlStream>(
        loop_, options_, self_, door.is_unix ? Stream(std::move(fd)) : Stream(std::move(fd), true, options_.secret),
        false, this);
    greeting_.emplace(stream.get(), Greeting{stream, &door, Clock::now(), from});
    stream->start_on_loop();
  }
}

// Who stands at a door and says nothing makes room for who comes; other doors have their own.
bool Listener::make_room_on_loop(const Door& door) {
  size_t at_door = 0;
  const Greeting* oldest = nullptr;
  for (const auto& [raw, greeting] : greeting_) {
    if (greeting.door != &door) continue;
    ++at_door;
    if (oldest == nullptr || greeting.since < oldest->since) oldest = &greeting;
  }
  if (at_door < kMaxGreeting) return true;
  if (Clock::now() - oldest->since < std::chrono::duration<double>(kPatience)) return false;
  const auto stream = oldest->stream;
  stream->close_on_loop(fail(MR_RESOURCE_EXHAUSTED, "others wait to be let in"), true);
  return true;
}

// What waits in the backlog would wake us for ever: look again a little later.
void Listener::pause_on_loop(Door& door, double seconds) {
  loop_.unwatch_on_loop(door.fd.get());
  loop_.at_on_loop(after(seconds), [this, &door] {
    if (door.fd.valid()) loop_.watch_on_loop(door.fd.get(), EPOLLIN, &door);
  });
}

void Listener::on_up(ControlStream& stream) {
  auto found = greeting_.extract(&stream);
  if (!found.empty()) arrived_(std::move(found.mapped().stream));
}

void Listener::on_closed(ControlStream& stream, const Status& why) {
  const auto found = greeting_.extract(&stream);
  if (!found.empty() && !found.mapped().from.empty()) strangers_.refused_on_loop(found.mapped().from, why);
}

void Listener::close_on_loop() {
  socket_file_.reset();
  for (auto& door : doors_) {
    if (!door->fd.valid()) continue;
    loop_.unwatch_on_loop(door->fd.get());
    door->fd.reset();
  }
  for (const auto& [raw, greeting] : std::exchange(greeting_, {}))
    greeting.stream->close_on_loop(fail(MR_PEER_LOST, "the engine is closed"), true);
  if (data_door_) data_door_->close_on_loop();
}

}  // namespace mr
