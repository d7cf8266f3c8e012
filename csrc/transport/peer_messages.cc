// Messages to a peer: the window that it granted, and the credit that it gets for what was read here.
#include <algorithm>

#include "peer.h"

namespace mr {

Status Peer::send_message(ByteView head, ByteView body, double timeout) {
  const Time deadline = timeout < 0 ? Time::max() : after(timeout);
  uint64_t connection = 0;
  if (Status failed = take_window(head.size() + body.size(), deadline, &connection); !failed.ok()) return failed;
  bool sent = true;
  if (loop().run_here([&] { sent = message_on_loop(head, body, connection); }))
    return sent ? Status{} : fail(MR_PEER_LOST, "the peer was lost");
  Bytes bytes(head.begin(), head.end());
  bytes.insert(bytes.end(), body.begin(), body.end());
  loop().run([self = shared_from_this(), connection, bytes = std::move(bytes)] {
    self->message_on_loop(bytes, {}, connection);  // else lost, like one that was on its way
  });
  return {};
}

Status Peer::take_window(uint64_t size, Time deadline, uint64_t* connection) {
  const uint64_t cost = message_cost(size);
  std::unique_lock guard(window_lock_);
  if (window_of_ == 0) {
    guard.unlock();
    if (Status failed = connect_within(deadline); !failed.ok()) return failed;
    guard.lock();
    if (window_of_ == 0) return fail(MR_PEER_LOST, "the peer was lost");
  }
  *connection = window_of_;
  if (size > max_frame_)
    return fail(MR_RESOURCE_EXHAUSTED,
                "over the peer's limit of " + std::to_string(max_frame_) + " bytes (its option max_frame_bytes)");
  if (cost > window_ / 2)
    return fail(MR_RESOURCE_EXHAUSTED, "over half of the peer's window of " + std::to_string(window_) +
                                           " bytes (its option message_window_bytes)");
  if (!senders_.empty() || window_used_ + cost > window_) return wait_for_window(guard, cost, deadline, *connection);
  window_used_ += cost;
  return {};
}

// First come, first served: a large message gets its room although small ones would fit before.
Status Peer::wait_for_window(std::unique_lock<std::mutex>& guard, uint64_t cost, Time deadline, uint64_t connection) {
  const Status full = fail(MR_TRANSFER_TIMEOUT, "the peer reads no messages and its window is full");
  if (Clock::now() >= deadline) return full;
  senders_.push_back(&cost);
  guard.unlock();
  OpRef watch;  // a peer that has stopped reads no messages either
  Status failed;
  try {
    watch = start(Verb::watch, Time::max());
  } catch (const Error& error) {
    failed = error.status();
  }
  guard.lock();
  const auto connected = [&] { return window_of_ == connection; };
  const auto my_turn = [&] { return senders_.front() == &cost && window_used_ + cost <= window_; };
  for (bool in_time = failed.ok(); in_time && connected() && !my_turn();) {
    if (deadline == Time::max())
      window_opened_.wait(guard);
    else
      in_time = window_opened_.wait_until(guard, deadline) == std::cv_status::no_timeout;
  }
  if (failed.ok() && !connected())
    failed = fail(MR_PEER_LOST, "the peer was lost");
  else if (failed.ok() && !my_turn())
    failed = full;
  else if (failed.ok())
    window_used_ += cost;
  std::erase(senders_, &cost);
  if (!senders_.empty()) window_opened_.notify_all();
  guard.unlock();
  if (watch) stop(watch, MR_CANCELLED);
  return failed;
}

OpRef Peer::start(Verb verb, Time deadline) {
  auto op = std::make_shared<Op>();
  op->verb = verb;
  op->submitted = Clock::now();
  op->deadline = deadline;
  op->peer_name = address_.name.empty() ? address_.tcp.text() : address_.name;
  home_.submit(shared_from_this(), op);
  return op;
}

Status Peer::connect_within(Time deadline) {
  const OpRef op = start(Verb::connect, deadline);
  op->wait(-1);
  return op->status();
}

// False where the connection that granted the window is gone.
bool Peer::message_on_loop(ByteView head, ByteView body, uint64_t connection) {
  if (connection != connection_) return false;
  if (state_ != State::self && streams_.empty()) return false;
  home_.count("sent_message_bytes", head.size() + body.size());
  if (state_ == State::self) {
    intake_->arrived(message_cost(head.size() + body.size()));
    home_.deliver_on_loop(*this, intake_, head, body);
    return true;
  }
  streams_.front()->send_on_loop(kMessage, 0, head, nullptr, body);
  return true;
}

Status Peer::reply_message_on_loop(ByteView data) {
  {
    std::lock_guard guard(window_lock_);
    if (window_of_ == 0) return fail(MR_PEER_LOST, "not connected");
    if (window_used_ + message_cost(data.size()) > window_)
      return fail(MR_RESOURCE_EXHAUSTED, "the peer reads no messages and its window is full");
    window_used_ += message_cost(data.size());
  }
  return message_on_loop(data, {}, connection_) ? Status{} : fail(MR_PEER_LOST, "not connected");
}

void Peer::give_credit(const std::shared_ptr<Intake>& intake) {
  loop().run([self = shared_from_this(), intake] {
    if (intake != self->intake_) return;  // of an earlier connection
    const uint64_t bytes = intake->take_credit();
    if (self->state_ == State::self)
      self->credit_on_loop(bytes);
    else
      self->send_on_loop(kCredit, Writer().put(bytes).take(), nullptr);
  });
}

void Peer::credit_on_loop(uint64_t bytes) {
  std::lock_guard guard(window_lock_);
  window_used_ -= std::min(bytes, window_used_);
  window_opened_.notify_all();
}

void Peer::unwatch() {
  loop().run([self = shared_from_this()] {
    if (self->inbox_watch_) self->stop_on_loop(OpRef(self->inbox_watch_), MR_CANCELLED);
  });
}

}  // namespace mr
