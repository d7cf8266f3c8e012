#include "session.h"

#include <chrono>

#include "failure.h"

namespace mr::bench {

Session::Session(const Options& options, const Secret& secret, const Lane* only,
                 const std::vector<std::string>& addresses)
    : handle_(options, secret, only), addresses_(addresses) {
  if (addresses.empty()) {
    own_ = std::make_unique<Owner>(handle_.engine);
    return;
  }
  mr_message_set_handler(handle_.engine, on_message, this);
  for (const auto& address : addresses) {
    mr_error error{};
    check(mr_peer_open(handle_.engine, address.c_str(), &peers_.emplace_back(), &error), error, "reading " + address);
    mr_op* op = nullptr;
    check(mr_connect(handle_.engine, address.c_str(), kOperationTimeout, &op, &error), error,
          "connecting to " + address);
    finish(op, "connecting to " + address);
  }
}

Session::~Session() {
  own_.reset();
  for (mr_peer* peer : peers_) mr_peer_close(peer);
  handle_.close();
}

void Session::send(size_t owner, const Bytes& bytes) {
  mr_error error{};
  check(mr_peer_send(peers_[owner], bytes.data(), bytes.size(), nullptr, 0, kOperationTimeout, &error), error,
        "sending to " + addresses_[owner]);
}

Answer Session::ask(size_t owner, Request request, const Bytes& tail, Bytes* answer_tail) {
  Bytes words;
  Answer answer;
  request.serial = ++serial_;
  if (own_) {
    answer = own_->answer(request, tail, &words);
  } else {
    send(owner, encode(kAsk, request, tail));
    std::unique_lock guard(lock_);
    auto deadline =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(kOperationTimeout + request.seconds);
    do {
      if (!arrived_.wait_until(guard, deadline, [this] { return !answers_.empty(); }))
        throw Failure(addresses_[owner] + " did not answer");
      words = decode(answers_.back(), &answer);
      answers_.pop_back();
    } while (answer.serial != request.serial);
  }
  if (answer.failed) throw Failure("the owner says: " + std::string(words.begin(), words.end()));
  if (answer_tail) *answer_tail = std::move(words);
  return answer;
}

struct Session::PingPong {
  Bytes message;
  std::vector<double>* samples;  // nullptr: several are in flight
  uint64_t to_send, in_flight, done = 0;
  bool verify;
  double end;
  double sent;  // when the last one left
  std::string failure;
};

void Session::on_message(void* context, const char*, const uint8_t* data, uint64_t length) {
  auto* self = static_cast<Session*>(context);
  if (length > 0 && data[0] == kPing) return self->on_pong(data, length);
  std::lock_guard guard(self->lock_);
  self->answers_.emplace_back(data, data + length);
  self->arrived_.notify_all();
}

void Session::on_pong(const uint8_t* data, uint64_t length) {
  double arrived = now();
  std::lock_guard guard(lock_);
  if (!pings_) return;
  PingPong& pings = *pings_;
  if (pings.samples) pings.samples->push_back(arrived - pings.sent);
  ++pings.done;
  const Bytes& message = pings.message;
  if (pings.verify && (length != message.size() || std::memcmp(data, message.data(), length) != 0))
    pings.failure = "a message came back changed";
  if (pings.to_send > 0 && arrived < pings.end && pings.failure.empty()) {
    --pings.to_send;
    pings.sent = now();
    mr_error error{};
    if (mr_message_reply(handle_.engine, message.data(), message.size(), &error) == MR_OK) return;
    pings.failure = error.message;
  }
  if (--pings.in_flight == 0) arrived_.notify_all();
}

Moved Session::ping_pong(uint64_t size, uint64_t in_flight, bool verify, const Turn& turn,
                         std::vector<double>* samples) {
  uint64_t first = std::min(turn.operations, in_flight);
  Bytes message(size);
  fill_pattern(message.data(), 0, size, 1);
  message[0] = kPing;
  double started = now();
  PingPong pings{std::move(message),
                 in_flight == 1 ? samples : nullptr,
                 turn.operations - first,
                 first,
                 0,
                 verify,
                 started + turn.seconds,
                 started,
                 {}};
  struct Active {
    Active(Session& s, PingPong& pings) : session(s) {
      std::lock_guard guard(session.lock_);
      pings.sent = now();
      session.pings_ = &pings;
    }
    ~Active() {
      std::lock_guard guard(session.lock_);
      session.pings_ = nullptr;
    }
    Session& session;
  } active(*this, pings);
  for (uint64_t i = 0; i < first; ++i) send(i % addresses_.size(), pings.message);
  std::unique_lock guard(lock_);
  auto limit = std::chrono::duration<double>(turn.seconds + kOperationTimeout);
  bool finished = arrived_.wait_for(guard, limit, [&] { return pings.in_flight == 0; });
  if (!finished) throw Failure("messages did not come back");
  if (!pings.failure.empty()) throw Failure(pings.failure);
  return {pings.done, pings.done * size, now() - started};
}

RemoteMemory::RemoteMemory(Session& session, size_t owner, const Request& allocate)
    : session_(&session), owner_(owner) {
  Bytes descriptor;
  where_ = session.ask(owner, allocate, {}, &descriptor);
  mr_error error{};
  check(mr_remote_open(session.engine(), descriptor.data(), descriptor.size(), &remote_, &error), error,
        "opening a region");
}

RemoteMemory::RemoteMemory(RemoteMemory&& other) noexcept
    : session_(other.session_),
      owner_(other.owner_),
      where_(other.where_),
      remote_(std::exchange(other.remote_, nullptr)) {}

RemoteMemory::~RemoteMemory() {
  if (remote_) mr_remote_close(remote_);
}

void RemoteMemory::release() {
  mr_remote_close(std::exchange(remote_, nullptr));
  Request request;
  request.ask = Ask::kFree;
  request.id = where_.id;
  session_->ask(owner_, request);
}

}  // namespace mr::bench
