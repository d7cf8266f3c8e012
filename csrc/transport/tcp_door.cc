// Where data sockets come in: a bounded number of strangers, each with a fixed few bytes and a moment to prove itself.
#include <sys/socket.h>

#include <algorithm>
#include <list>
#include <optional>

#include "tcp_link.h"

namespace mr {
namespace tcp {
namespace {

constexpr size_t kMaxGreetings = 256;
constexpr int kMaxChecks = 36;         // for its session: two seconds in all, in which a lost packet is sent thrice
constexpr int kSlowestCheck = 6;       // from this one on each comes 64 ms later
constexpr uint8_t kTlsHandshake = 22;  // the first byte of every TLS connection; of ours without TLS it is an M

class Door;

// One socket until it has proved itself.
class Greeting final : public Loop::Watcher, public std::enable_shared_from_this<Greeting> {
 public:
  Greeting(Door& door, Fd socket)
      : from(peer_host(socket.get())), door_(door), socket_(std::move(socket)), fd_(socket_.get()) {}

  void start();
  void close();

  const std::string from;

 private:
  enum class Step { look, secure, listen, await_session };

  void on_event(uint32_t events) override;
  bool step();  // false: waits for the socket
  bool look();
  bool wait_for(Tls::Want want);
  void check_hello();
  void check_again();

  Door& door_;
  Fd socket_;                     // until its first byte has told
  std::optional<Stream> stream_;  // whether it speaks TLS
  const int fd_;
  Step step_ = Step::look;
  uint32_t watched_ = 0;
  Loop::TimerId deadline_{}, again_{};
  int num_checks_ = 0;
  bool open_ = false;
  Hello hello_;
  size_t have_ = 0;
};

class Door final : public DataDoor {
 public:
  Door(Loop& loop, const Options& options, Find find, Refused refused)
      : loop(loop), options(options), find(std::move(find)), refused_(std::move(refused)) {}

  void accept_on_loop(Fd socket) override {
    // The one that has been at it for longest goes: an honest greeting takes milliseconds.
    if (greetings_.size() >= kMaxGreetings) show_out(greetings_.front());
    auto greeting = std::make_shared<Greeting>(*this, std::move(socket));
    greetings_.push_back(greeting);
    try {
      greeting->start();
    } catch (const Error&) {
      show_out(greeting);
    }
  }

  void close_on_loop() override {
    for (const auto& greeting : std::exchange(greetings_, {})) greeting->close();
  }

  void show_out(std::shared_ptr<Greeting> greeting) {
    greeting->close();
    greetings_.remove(greeting);
  }

  // Members leave too, when they have to: that is no news.
  void refuse(const std::shared_ptr<Greeting>& greeting, const Status& why) {
    if (refused_ && why.kind != MR_PEER_LOST) refused_(greeting->from, why);
    show_out(greeting);
  }

  Loop& loop;
  const Options& options;
  const Find find;

 private:
  const Refused refused_;
  std::list<std::shared_ptr<Greeting>> greetings_;
};

void Greeting::start() {
  watched_ = EPOLLIN;
  door_.loop.watch_on_loop(fd_, watched_, this);
  open_ = true;
  deadline_ = door_.loop.at_on_loop(after(door_.options.raw.connect_timeout), [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->door_.refuse(self, fail(MR_AUTHENTICATION, "it proved nothing in time"));
  });
}

void Greeting::close() {
  if (!std::exchange(open_, false)) return;
  door_.loop.unwatch_on_loop(fd_);
  door_.loop.cancel_on_loop(deadline_);
  door_.loop.cancel_on_loop(again_);
  stream_.reset();
  socket_.reset();
}

// Whatever is wrong, a stranger learns nothing but that the connection has ended.
void Greeting::on_event(uint32_t) {
  const auto self = shared_from_this();
  try {
    while (open_ && step()) {
    }
  } catch (const Error& error) {
    door_.refuse(self, error.status());
  }
}

bool Greeting::wait_for(Tls::Want want) {
  const uint32_t wanted = want == Tls::Want::write ? EPOLLOUT : EPOLLIN;
  if (wanted != watched_) door_.loop.change_on_loop(fd_, wanted);
  watched_ = wanted;
  return false;
}

bool Greeting::look() {
  uint8_t first = 0;
  const ssize_t got = ::recv(fd_, &first, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got <= 0) throw Error(MR_PEER_LOST, "it left");
  if (first == kTlsHandshake)
    stream_.emplace(std::move(socket_), true, door_.options.secret);
  else if (door_.options.raw.bulk_tls == 0)
    stream_.emplace(std::move(socket_));
  else
    throw Error(MR_AUTHENTICATION, "a plain socket where TLS is demanded");
  step_ = Step::secure;
  return true;
}

bool Greeting::step() {
  if (step_ == Step::await_session) return false;
  if (step_ == Step::look) return look();
  if (step_ == Step::secure) {
    const auto io = stream_->handshake();
    if (!io.status.ok()) throw Error(io.status);
    if (io.want != Tls::Want::nothing) return wait_for(io.want);
    step_ = Step::listen;
  }
  const iovec rest{reinterpret_cast<uint8_t*>(&hello_) + have_, sizeof hello_ - have_};
  const auto io = stream_->read(&rest, 1);
  if (io.closed) throw Error(MR_PEER_LOST, "it left");
  if (io.bytes == 0) return wait_for(io.want);
  have_ += io.bytes;
  if (have_ == sizeof hello_) check_hello();
  return true;
}

// The last proof of a control stream and the first data socket come over different connections: the session may be up
// in a moment.
void Greeting::check_again() {
  step_ = Step::await_session;
  again_ =
      door_.loop.at_on_loop(after(0.001 * (1 << std::min(num_checks_++, kSlowestCheck))), [weak = weak_from_this()] {
        const auto self = weak.lock();
        if (!self || !self->open_) return;
        try {
          self->check_hello();
        } catch (const Error& error) {
          self->door_.refuse(self, error.status());
        }
      });
}

void Greeting::check_hello() {
  if (hello_.magic != kMagic || hello_.version != kVersion) throw Error(MR_PROTOCOL, "no hello of a data socket");
  const DataDoor::Session session = door_.find(hello_.session);
  auto* const link = dynamic_cast<TcpLink*>(session.link.get());
  if (link == nullptr && num_checks_ < kMaxChecks) return check_again();
  if (link == nullptr) throw Error(MR_AUTHENTICATION, "no such session");
  const Digest binding = stream_->binding(kBindingLabel);
  if (!equal_constant_time(hello_.proof, client_proof(session.key, hello_, binding)))
    throw Error(MR_AUTHENTICATION, "a wrong proof");
  if (!link->server().claim(hello_.session, hello_.number)) throw Error(MR_AUTHENTICATION, "a hello that was used");

  Welcome welcome;
  random_bytes(welcome.nonce, sizeof welcome.nonce);
  welcome.proof = server_proof(session.key, hello_, welcome, binding);
  const iovec whole{&welcome, sizeof welcome};
  // The first bytes on this socket: they fit, or it is broken.
  if (stream_->write(&whole, 1).bytes != sizeof welcome) throw Error(MR_PEER_LOST, "it left");

  door_.loop.unwatch_on_loop(fd_);
  Stream stream = std::move(*stream_);
  stream_.reset();
  open_ = false;
  door_.loop.cancel_on_loop(deadline_);
  link->server().adopt(hello_.session, hello_.number, std::move(stream));
  door_.show_out(shared_from_this());
}

}  // namespace
}  // namespace tcp

std::unique_ptr<DataDoor> make_data_door(Loop& loop, const Options& options, DataDoor::Find find,
                                         DataDoor::Refused refused) {
  return std::make_unique<tcp::Door>(loop, options, std::move(find), std::move(refused));
}

}  // namespace mr
