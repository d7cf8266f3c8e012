#include "dialer.h"

#include "socket_file.h"

namespace mr {

Dialer::Dialer(Loop& loop, const Options& options, const PeerInfo& self, Address to, Done done)
    : loop_(loop), options_(options), self_(self), to_(std::move(to)), done_(std::move(done)) {
  const bool same_host = !to_.boot_id.empty() && to_.boot_id == self_.boot_id;
  if (same_host && options_.raw.same_host_unix && !to_.unix_name.empty()) {
    ways_.push_back({to_.unix_name, {}});
    // Abstract names end where the network namespace does.
    if (const std::string path = socket_file_path(options_.unix_socket_dir, to_.unix_name); !path.empty())
      ways_.push_back({path, {}});
  }
  if (to_.tcp.port == 0) return;
  // The advertised address may not be routed on its own host; another network namespace may not share our loopback.
  const HostPort loopback{to_.tcp.host.find(':') == std::string::npos ? "127.0.0.1" : "::1", to_.tcp.port};
  if (same_host && loopback.host != to_.tcp.host) ways_.push_back({"", loopback});
  ways_.push_back({"", to_.tcp});
}

void Dialer::start_on_loop() {
  if (ways_.empty())
    return finish_on_loop(nullptr, fail(MR_PEER_LOST, "its address offers no way to reach it from here"));
  until_ = after(options_.raw.connect_timeout);
  next_on_loop();
}

void Dialer::stop_on_loop(const Status& why) {
  if (!done_) return;
  way_ = ways_.size();
  if (stream_) return stream_->close_on_loop(why, true);
  if (connecting_.valid()) return failed_on_loop(why);
}

void Dialer::next_on_loop() {
  while (way_ < ways_.size()) {
    const Way& way = ways_[way_];
    try {
      connecting_ = way.unix_name.empty() ? tcp_connect_start(way.tcp, 0) : unix_connect_start(way.unix_name);
      loop_.watch_on_loop(connecting_.get(), EPOLLOUT, this);
    } catch (const Error& error) {
      connecting_.reset();
      return failed_on_loop(error.status());
    }
    deadline_ = loop_.at_on_loop(after(options_.raw.connect_timeout), [self = shared_from_this()] {
      self->failed_on_loop(
          fail(MR_PEER_LOST, "no connection within " + std::to_string(self->options_.raw.connect_timeout) + " s"));
    });
    return;
  }
  finish_on_loop(nullptr, worst_);
}

void Dialer::failed_on_loop(const Status& status) {
  const auto self = shared_from_this();
  if (connecting_.valid()) {
    loop_.unwatch_on_loop(connecting_.get());
    loop_.cancel_on_loop(deadline_);
    connecting_.reset();
  }
  // Of several failures the one that says most: a refused membership or version before a refused connection.
  const bool telling = status.kind == MR_AUTHENTICATION || status.kind == MR_PROTOCOL;
  if (worst_.ok() || telling || (worst_.kind == MR_PEER_LOST && status.kind != MR_PEER_LOST)) {
    worst_ = status;
    if (worst_.ok()) worst_ = fail(MR_PEER_LOST, "the connection was closed during the hello");
    if (way_ < ways_.size()) worst_.text += " (" + ways_[way_].text() + ")";
  }
  // Whoever is stopped takes connections, and answers over no way.
  way_ = Clock::now() < until_ ? way_ + 1 : ways_.size();
  next_on_loop();
}

void Dialer::on_event(uint32_t) {
  const auto self = shared_from_this();
  if (const int error = socket_error(connecting_.get()); error != 0)
    return failed_on_loop(fail(MR_PEER_LOST, "can't connect", error));
  try {
    begin_stream_on_loop();
  } catch (const Error& error) {
    stream_.reset();
    failed_on_loop(error.status());
  }
}

void Dialer::begin_stream_on_loop() {
  loop_.unwatch_on_loop(connecting_.get());
  loop_.cancel_on_loop(deadline_);
  const bool over_unix = !ways_[way_].unix_name.empty();
  if (!over_unix) tune_tcp(connecting_.get(), options_.raw.heartbeat_timeout);
  Stream stream = over_unix ? Stream(std::move(connecting_)) : Stream(std::move(connecting_), false, options_.secret);
  stream_ = std::make_shared<ControlStream>(loop_, options_, self_, std::move(stream), true, this);
  stream_->start_on_loop();
}

void Dialer::on_up(ControlStream& stream) {
  const auto self = shared_from_this();
  const PeerInfo& info = stream.info();
  if (to_.incarnation != 0 && info.incarnation != to_.incarnation)
    return stream.close_on_loop(
        fail(MR_PEER_LOST,
             "another process (" + info.name + ") answers there now: the one that this handle belongs to has ended"),
        true);
  finish_on_loop(std::move(stream_), {});
}

void Dialer::on_closed(ControlStream&, const Status& status) {
  const auto self = shared_from_this();
  stream_.reset();
  failed_on_loop(status);
}

void Dialer::finish_on_loop(std::shared_ptr<ControlStream> stream, const Status& status) {
  if (auto done = std::exchange(done_, nullptr)) done(std::move(stream), status);
}

}  // namespace mr
