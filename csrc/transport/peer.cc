#include "peer.h"

#include <algorithm>
#include <cassert>

#include "process_life.h"

namespace mr {
namespace {

constexpr size_t kMaxText = 4096;
constexpr uint32_t kFramesPerLane = 100;
constexpr double kProbeInterval = 0.01;  // whether a process on this host lives, while something is pending

Status stopped(int kind, const Op& op) {
  if (kind == MR_TRANSFER_TIMEOUT)
    return fail(kind, "no end within its " +
                          std::to_string(std::chrono::duration<double>(op.deadline - op.submitted).count()) +
                          " s timeout");
  return fail(kind, "cancelled");
}

bool moves_bytes(Verb verb) { return verb == Verb::read || verb == Verb::write; }

// By the thread that submits it. Of a write that notifies, the bytes.
bool may_be_inline(const Op& op) {
  return op.has_notify ? op.verb == Verb::write && op.bytes() > 0 : moves_bytes(op.verb) || is_atomic(op.verb);
}

Bytes encode_reply(const Reply& reply) {
  Writer out;
  out.put(static_cast<uint16_t>(reply.status.kind)).put(static_cast<int32_t>(reply.status.sys_errno));
  out.text(std::string_view(reply.status.text).substr(0, kMaxText)).raw(reply.payload);
  return out.take();
}

Reply decode_reply(Frame& frame) {
  Reader in(frame.payload);
  Reply reply;
  reply.status.kind = in.get<uint16_t>();
  if (reply.status.kind > MR_CONFIG)
    throw Error(MR_PROTOCOL, "a reply of unknown kind " + std::to_string(reply.status.kind));
  reply.status.sys_errno = in.get<int32_t>();
  reply.status.text = in.text(kMaxText);
  reply.from_peer = true;
  const ByteView rest = in.rest();
  reply.payload.assign(rest.begin(), rest.end());
  if (!frame.fds.empty()) reply.fd = std::move(frame.fds.front());
  return reply;
}

}  // namespace

// The end of a process on this host, also where a forked child keeps its sockets open.
class Peer::ProcessWatch : public Loop::Watcher {
 public:
  ProcessWatch(Peer& peer, ProcessLife life) : peer_(peer), life_(std::move(life)) {
    peer_.loop().watch_on_loop(life_.pidfd(), EPOLLIN, this);
  }
  ~ProcessWatch() { peer_.loop().unwatch_on_loop(life_.pidfd()); }

  bool has_memory() const { return life_.has_memory(); }

 private:
  void on_event(uint32_t) override {
    const auto self = peer_.shared_from_this();
    peer_.loop().unwatch_on_loop(life_.pidfd());
    peer_.loop().post([self] { self->process_ended_on_loop(); });
  }

  Peer& peer_;
  const ProcessLife life_;
};

Status Peer::process_ended() const {
  return fail(MR_PEER_LOST, "its process (pid " + std::to_string(info_.pid) + ") has ended");
}

// Its last words may still be in the streams. Its end too, unless a forked child holds them open.
void Peer::process_ended_on_loop() {
  drain_on_loop();
  if (state_ == State::up) lost_on_loop(process_ended());
}

void Peer::drain_on_loop() {
  for (const auto& stream : std::vector(streams_)) stream->drain_on_loop();
}

Peer::Peer(Home& home, Address address) : home_(home), address_(std::move(address)) {
  info_.name = address_.name.empty() ? address_.tcp.text() : address_.name;
}

Peer::~Peer() { assert(pending_.empty()); }

void Peer::set_links_on_loop(Links links) {
  reads_now_ = std::any_of(links.begin(), links.end(), [](const Lane& lane) { return lane.link->reads_now(); });
  links_.set(std::make_shared<const Links>(std::move(links)));
}

// ---- The life of an operation ----

constexpr uint32_t kLaneFlags = ~0xffu;  // see mr_flags

// The best of all that can carry it, where the flags allow that one; else null.
Link* Peer::best_of(const Links& links, const Op& op, uint32_t flags) {
  const auto best = std::find_if(links.begin(), links.end(), [&](const Lane& lane) { return lane.link->carries(op); });
  const uint32_t wanted = flags & kLaneFlags;
  return best != links.end() && (wanted == 0 || (wanted & best->flag) != 0) ? best->link.get() : nullptr;
}

const char* Peer::read_now(const RemoteRegion& remote, uint8_t* local, uint64_t offset, uint64_t length,
                           uint32_t flags) {
  static const Op of_host_memory;
  const auto now = links();
  Link* const best = best_of(*now, of_host_memory, flags);
  return best == nullptr ? nullptr : best->read_now(remote, local, offset, length);
}

void Peer::submit(const OpRef& op) {
  if (may_be_inline(*op)) {
    const auto now = links();
    if (Link* const best = best_of(*now, *op, op->flags); best != nullptr && best->try_inline(op)) return;
  }
  loop().run([self = shared_from_this(), op] { self->admit_on_loop(op); });
}

void Peer::on_done(const OpRef& op, Status status) {
  const bool is_written = status.ok() && op->has_notify;  // the rest is the loop's
  if (is_written) op->set_helper(nullptr);
  if (!op->admitted && status.kind >= 0 && !is_written) {  // inline, by the caller's thread
    op->finish(std::move(status));
    home_.op_ended();
    return;
  }
  loop().run([self = shared_from_this(), op, status = std::move(status)]() mutable {
    if (op->admitted)
      self->done_on_loop(op, std::move(status));
    else
      self->admit_on_loop(op);
  });
}

void Peer::admit_on_loop(const OpRef& op) {
  op->admitted = true;
  pending_.insert(op);
  num_watches_ += op->verb == Verb::watch;
  num_quiet_ += op->is_quiet;
  resting_ = false;
  if (state_ == State::closed) return finish_on_loop(op, fail(MR_CONFIG, "the engine is closed"));
  if (op->stopping()) return finish_on_loop(op, stopped(op->stop_kind, *op));
  if (op->for_inbox) {
    if (inbox_watch_) return watch_again_on_loop(op);
    inbox_watch_ = op;
  }
  if (op->deadline != Time::max()) {
    op->timer = loop().at_on_loop(op->deadline, [this, op] {
      op->has_timer = false;
      stop_on_loop(op, MR_TRANSFER_TIMEOUT);
    });
    op->has_timer = true;
  }
  if (state_ == State::up || state_ == State::self) return dispatch_on_loop(op);
  waiting_.push_back(op);
  connect_on_loop();
}

// The later word counts.
void Peer::watch_again_on_loop(const OpRef& op) {
  std::swap(inbox_watch_->is_quiet, op->is_quiet);
  finish_on_loop(op, {});
  beat_on_loop();
}

void Peer::dispatch_on_loop(const OpRef& op) {
  beat_on_loop();
  Writer out;
  if (op->remote) op->remote->name.encode(out);
  switch (op->verb) {
    case Verb::read:
    case Verb::write:
    case Verb::map:
      if (op->has_notify && op->remote_state == MR_WRITTEN) return notify_on_loop(op);  // inline, see on_done
      if (op->has_notify && op->bytes() == 0) {                                         // no lane has anything to carry
        op->lane = state_ == State::self ? "local" : "control";
        return notify_on_loop(op);
      }
      return next_link_on_loop(op);
    case Verb::fetch_add:
    case Verb::compare_and_swap:
      out.put(op->remote_view.offset()).put(static_cast<uint8_t>(op->verb)).put(op->operand[0]).put(op->operand[1]);
      return request_op_on_loop(op, kAtomic, out.take());
    case Verb::drop:
      return request_op_on_loop(op, kDrop, out.take());
    case Verb::lookup:
      return request_op_on_loop(op, kLookup, Writer().text(op->name).take());
    case Verb::connect:
      return finish_on_loop(op, {});
    case Verb::watch:
      return;  // ends with the peer
  }
}

void Peer::next_link_on_loop(const OpRef& op) {
  const auto now = links();
  const uint32_t wanted = op->flags & kLaneFlags;
  for (size_t i = 0; i < now->size(); ++i) {
    const Lane& lane = (*now)[i];
    const uint32_t bit = 1u << i;
    if ((op->tried_lanes & bit) != 0 || (wanted != 0 && (wanted & lane.flag) == 0) || !lane.link->carries(*op))
      continue;
    if ((op->flags & MR_STRICT) != 0 && op->tried_lanes != 0) break;
    op->tried_lanes |= bit;
    if (const std::string reason = lane.link->refuses(*op); !reason.empty()) {
      op->skipped += (op->skipped.empty() ? "" : "; ") + std::string(lane.link->lane()) + ": " + reason;
      continue;
    }
    op->link = lane.link;
    try {
      op->verb == Verb::map ? lane.link->map_on_loop(op) : lane.link->start_on_loop(op);
    } catch (const Error& error) {
      on_done(op, error.status());
    }
    return;
  }
  const std::string why = op->skipped.empty() ? "the lanes it may use are not shared with this peer" : op->skipped;
  const bool strict = (op->flags & MR_STRICT) != 0;
  finish_on_loop(op, fail(op->unreachable ? MR_PEER_LOST : MR_CONFIG,
                          (strict ? "strict, and its lane can't carry it: " : "no lane can carry it: ") + why));
}

void Peer::request_op_on_loop(const OpRef& op, uint16_t type, Bytes payload) {
  if (is_atomic(op->verb) || op->verb == Verb::drop) op->remote_state = MR_UNKNOWN;
  op->request_id = send_request_on_loop(type, payload, [this, op](Reply reply) {
    op->request_id = 0;
    op->lane = state_ == State::self ? "local" : "control";
    if (is_atomic(op->verb) && reply.status.ok()) op->value = Reader(reply.payload).get<uint64_t>();
    if (reply.from_peer) op->remote_state = reply.status.ok() ? MR_WRITTEN : MR_NOT_WRITTEN;
    op->reply = std::move(reply.payload);
    finish_on_loop(op, std::move(reply.status));
  });
}

void Peer::done_on_loop(const OpRef& op, Status status) {
  op->link.reset();
  if (status.kind < 0) {
    op->unreachable |= status.kind == kUnreachable;
    op->skipped += (op->skipped.empty() ? "" : "; ") + status.text;
    if (!op->stopping() && (state_ == State::up || state_ == State::self)) return next_link_on_loop(op);
    status = fail(MR_PEER_LOST, status.text);
  }
  if (!status.ok() && op->stopping()) status = stopped(op->stop_kind, *op);
  if (status.ok() && op->has_notify) return notify_on_loop(op);
  finish_on_loop(op, std::move(status));
}

// After the write's bytes are visible there, on the ordered stream, once: it is never sent again.
void Peer::notify_on_loop(const OpRef& op) {
  Writer out;
  op->remote->name.encode(out);
  out.put(op->notify);
  op->request_id = send_request_on_loop(kNotify, out.bytes(), [this, op](Reply reply) {
    op->request_id = 0;
    finish_on_loop(op, std::move(reply.status));
  });
}

void Peer::finish_on_loop(const OpRef& op, Status status) {
  if (op->has_timer) loop().cancel_on_loop(op->timer);
  op->has_timer = false;
  if (pending_.erase(op) == 0) return;
  num_watches_ -= op->verb == Verb::watch;
  num_quiet_ -= op->is_quiet;
  if (!status.ok()) count("ops_failed", 1);
  if (op == inbox_watch_) {
    inbox_watch_.reset();
    if (status.kind != MR_CANCELLED)
      home_.watched_lost_on_loop(op->name, Status{status.kind, status.sys_errno, info_.name + ": " + status.text});
  }
  op->finish(std::move(status));
  home_.op_ended();
  rest_on_loop();
}

void Peer::rest_on_loop() { resting_ = state_ == State::idle && pending_.empty(); }

void Peer::stop(const OpRef& op, int kind) {
  int none = 0;
  op->stop_kind.compare_exchange_strong(none, kind);
  loop().run([self = shared_from_this(), op, kind] { self->stop_on_loop(op, kind); });
}

void Peer::stop_on_loop(const OpRef& op, int kind) {
  int none = 0;
  op->stop_kind.compare_exchange_strong(none, kind);
  if (pending_.count(op) == 0) return;  // done, or not here yet: admit_on_loop will see it
  if (const auto link = op->link) {
    link->stop_on_loop(op);
    return op->wind_up();
  }
  if (op->request_id != 0) requests_.erase(std::exchange(op->request_id, 0));
  std::erase(waiting_, op);
  finish_on_loop(op, stopped(op->stop_kind, *op));
}

// ---- The connection ----

void Peer::connect_on_loop() {
  if (state_ != State::idle) return;
  state_ = State::connecting;
  if (Clock::now() < cut_until_) return connect_after_cut_on_loop();
  dialer_ = std::make_shared<Dialer>(loop(), options(), home_.self(), address_,
                                     [weak = weak_from_this()](std::shared_ptr<ControlStream> stream, Status why) {
                                       const auto self = weak.lock();
                                       if (!self) {
                                         if (stream) stream->close_on_loop({}, false);
                                         return;
                                       }
                                       // The dialer is on the stack: it goes when it has returned.
                                       self->loop().post([dialer = std::move(self->dialer_)] {});
                                       if (stream)
                                         self->up_on_loop(std::move(stream));
                                       else if (self->state_ == State::connecting)
                                         self->lost_on_loop(why);
                                     });
  dialer_->start_on_loop();
}

// Whoever dials through a cut network hears nothing.
void Peer::connect_after_cut_on_loop() {
  const Time patience = after(options().raw.connect_timeout);
  loop().at_on_loop(std::min(cut_until_, patience), [weak = weak_from_this(), patience] {
    const auto self = weak.lock();
    if (!self || self->state_ != State::connecting || self->dialer_) return;
    if (Clock::now() >= patience) return self->lost_on_loop(fail(MR_PEER_LOST, "no answer (the connection is cut)"));
    self->state_ = State::idle;
    self->connect_on_loop();
  });
}

bool Peer::put_fault_on_loop(const Fault& fault) {
  if (state_ != State::up) return false;
  if (fault.kind == MR_FAULT_CUT) cut_until_ = std::max(cut_until_, fault.until);
  for (const auto& lane : *links()) lane.link->put_fault_on_loop(fault);
  for (const auto& stream : std::vector(streams_)) stream->put_fault_on_loop(fault);
  return true;
}

void Peer::adopt_on_loop(std::shared_ptr<ControlStream> stream) { up_on_loop(std::move(stream)); }

// Two processes that dial each other at the same moment end up with two streams; each sends on the one it had first.
void Peer::up_on_loop(std::shared_ptr<ControlStream> stream) {
  if (state_ == State::closed) return stream->close_on_loop(fail(MR_PEER_LOST, "the engine is closed"), true);
  stream->set_handler_on_loop(this);
  streams_.push_back(stream);
  if (Clock::now() < cut_until_) stream->put_fault_on_loop({MR_FAULT_CUT, cut_until_});
  home_.session_on_loop(stream->session_id(), shared_from_this(), true);
  if (state_ == State::up) return;
  state_ = State::up;
  ++connection_;
  resting_ = false;
  info_ = stream->info();
  last_heard_ = Clock::now();
  watch_process_on_loop();
  open_window_on_loop();
  Links fresh;
  for (const auto& type : home_.lanes()) {
    const bool offered = ("," + info_.lanes + ",").find("," + std::string(type.name) + ",") != std::string::npos;
    if (!offered || !options().allows(type.name)) continue;
    if (auto link = type.make(*this)) fresh.push_back({std::move(link), type.flag, type.first_frame});
  }
  set_links_on_loop(std::move(fresh));
  for (const auto& op : std::exchange(waiting_, {})) dispatch_on_loop(op);
}

void Peer::become_self_on_loop() {
  state_ = State::self;
  resting_ = false;
  info_ = home_.self();
  Links own{{make_local(*this), ~0u, 0}};
  for (const auto& type : home_.lanes())
    if (type.make_own)
      if (auto link = type.make_own(*this)) own.push_back({std::move(link), ~0u, type.first_frame});
  set_links_on_loop(std::move(own));
  ++connection_;
  open_window_on_loop();
}

void Peer::open_window_on_loop() {
  intake_ = std::make_shared<Intake>(weak_from_this(), options().raw.message_window_bytes);
  std::lock_guard guard(window_lock_);
  window_ = info_.message_window;
  max_frame_ = info_.max_frame;
  window_used_ = 0;
  window_of_ = connection_;
}

void Peer::watch_process_on_loop() {
  if (ProcessLife life(info_.pid); life.is_known()) process_ = std::make_unique<ProcessWatch>(*this, std::move(life));
  // Before the links are made: then it tries.
  if (info_.pid > 0 && options().allow_ptrace == "job") may_trace_ = std::make_unique<MayTrace>(info_.pid);
}

void Peer::on_closed(ControlStream& stream, const Status& status) {
  const auto ours = [&] {
    return std::any_of(streams_.begin(), streams_.end(), [&](const auto& each) { return each.get() == &stream; });
  };
  if (!ours()) return;  // we are closing it
  if (status.kind == MR_PROTOCOL) return lost_on_loop(fail(MR_PROTOCOL, status.text));
  drain_on_loop();      // where two dialled each other, its last words are in the other stream
  if (!ours()) return;  // whose end was told then
  if (process_ && !process_->has_memory()) return lost_on_loop(process_ended());
  lost_on_loop(fail(MR_PEER_LOST, status.ok() ? "it ended, or closed the connection" : status.text));
}

void Peer::lost_on_loop(const Status& why) {
  const auto self = shared_from_this();
  if (state_ == State::idle) return;
  if (state_ != State::closed) state_ = State::idle;
  if (auto dialer = std::exchange(dialer_, nullptr)) {
    dialer->stop_on_loop(why);
    loop().post([dialer] {});  // it may be on this stack
  }
  process_.reset();
  may_trace_.reset();
  for (const auto& stream : std::exchange(streams_, {})) {
    home_.session_on_loop(stream->session_id(), self, false);
    stream->close_on_loop(why, true);
  }
  {
    std::lock_guard guard(window_lock_);
    window_of_ = 0;
    window_opened_.notify_all();
  }
  const auto gone = links();
  set_links_on_loop({});
  for (const auto& lane : *gone) lane.link->close_on_loop(why);
  for (const auto& op : std::vector<OpRef>(pending_.begin(), pending_.end()))
    if (op->link) op->wind_up();
  // Links may be on this stack, and other threads inside them, until their operations have ended.
  loop().post([gone] {});
  for (auto& [id, on_reply] : std::exchange(requests_, {})) on_reply({why, {}, {}});
  waiting_.clear();
  for (const auto& op : std::vector<OpRef>(pending_.begin(), pending_.end()))
    if (!op->link) finish_on_loop(op, why);
  rest_on_loop();
}

void Peer::stop_all_on_loop(int kind) {
  for (const auto& lane : *links()) lane.link->stop_inline_on_loop(kind);
  for (const auto& op : std::vector<OpRef>(pending_.begin(), pending_.end())) stop_on_loop(op, kind);
}

bool Peer::has_unsent_on_loop() const {
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->has_unsent(); });
}

void Peer::close_on_loop(const Status& why) {
  const auto self = shared_from_this();
  const bool was_idle = state_ == State::idle;
  state_ = State::closed;
  const auto gone = links();
  if (!was_idle) lost_on_loop(why);
  for (const auto& lane : *gone) lane.link->abandon_on_loop();
}

// Only while something is pending here: an idle pair of processes costs nothing.
void Peer::beat_on_loop() {
  if (state_ != State::up) return;
  // A watch alone is content with the end of the stream, the pidfd and the heartbeat.
  if (process_ && pending_.size() > num_watches_ && !std::exchange(probing_, true)) probe_on_loop();
  if (!needs_beats() || std::exchange(beating_, true)) return;
  last_heard_ = Clock::now();
  next_beat_ = after(options().raw.heartbeat_interval);
  struct Beat {
    static void schedule(const std::shared_ptr<Peer>& peer) {
      peer->loop().at_on_loop(peer->next_beat_, [weak = std::weak_ptr(peer)] {
        if (auto self = weak.lock()) tick(self);
      });
    }
    static void tick(const std::shared_ptr<Peer>& self) {
      const auto& raw = self->options().raw;
      if (self->state_ != State::up || !self->needs_beats()) {
        self->beating_ = false;
        return;
      }
      const Time now = Clock::now();
      const auto seconds = [](auto d) { return std::chrono::duration<double>(d).count(); };
      // This process was stopped or starved itself: what it did not read is no proof of silence.
      if (seconds(now - self->next_beat_) > raw.heartbeat_interval) self->last_heard_ = now;
      for (const auto& stream : self->streams_) self->last_heard_ = std::max(self->last_heard_, stream->last_read());
      const double silence = seconds(now - self->last_heard_);
      if (silence > raw.heartbeat_timeout) {
        self->beating_ = false;
        return self->lost_on_loop(fail(
            MR_PEER_LOST, "no sign of life for " + std::to_string(raw.heartbeat_timeout) + " s (stopped, or cut off)"));
      }
      self->streams_.front()->send_on_loop(kPing, 0, {});
      // At the latest when its time is up: not up to one interval later.
      self->next_beat_ = after(std::min(raw.heartbeat_interval, raw.heartbeat_timeout - silence + 0.001));
      schedule(self);
    }
  };
  Beat::schedule(shared_from_this());
}

void Peer::probe_on_loop() {
  loop().at_on_loop(after(kProbeInterval), [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    self->probing_ = self->state_ == State::up && self->process_ && self->pending_.size() > self->num_watches_;
    if (!self->probing_) return;
    if (!self->process_->has_memory()) return self->process_ended_on_loop();
    self->probe_on_loop();
  });
}

// ---- Frames ----

uint64_t Peer::session_id() { return streams_.empty() ? 0 : streams_.front()->session_id(); }
Digest Peer::session_key() { return streams_.empty() ? Digest{} : streams_.front()->session_key(); }

DataDoor::Session Peer::session_on_loop(uint64_t session_id) {
  for (const auto& stream : streams_)
    if (stream->session_id() == session_id)
      for (const auto& lane : *links())
        if (lane.first_frame == kTcpFence) return {lane.link, stream->session_key()};
  return {};
}

void Peer::send_on_loop(uint16_t type, Bytes payload, const Fd* pass_fd) {
  if (!streams_.empty()) streams_.front()->send_on_loop(type, 0, payload, pass_fd);
}

void Peer::broadcast_on_loop(uint16_t type, const Bytes& payload) {
  const auto now = links();
  const auto knows = [type](const Lane& lane) {
    return lane.first_frame != 0 && type >= lane.first_frame && type < lane.first_frame + kFramesPerLane;
  };
  if (state_ == State::up && std::any_of(now->begin(), now->end(), knows)) send_on_loop(type, payload, nullptr);
}

void Peer::settle_on_loop(uint64_t request_id, Reply reply) {
  auto found = requests_.extract(request_id);
  if (!found.empty()) found.mapped()(std::move(reply));  // else given up: timed out or cancelled
}

uint64_t Peer::send_request_on_loop(uint16_t type, const Bytes& payload, std::function<void(Reply)> on_reply) {
  const uint64_t id = next_request_++;
  requests_.emplace(id, std::move(on_reply));
  const auto settle = [self = shared_from_this(), id](Reply reply) { self->settle_on_loop(id, std::move(reply)); };
  if (state_ == State::self) {
    serve_request_on_loop(type, payload, {}, [this, settle](Reply reply) {
      reply.from_peer = true;
      loop().post([settle, reply = std::make_shared<Reply>(std::move(reply))] { settle(std::move(*reply)); });
    });
  } else if (state_ == State::up) {
    streams_.front()->send_on_loop(type, id, payload);
  } else {
    loop().post([settle] { settle({fail(MR_PEER_LOST, "not connected"), {}, {}}); });
  }
  return id;
}

void Peer::request_on_loop(uint16_t type, Bytes payload, std::function<void(Reply)> on_reply) {
  send_request_on_loop(type, payload, std::move(on_reply));
}

void Peer::on_frame(ControlStream& stream, Frame& frame) {
  if (frame.type == kMessage) {
    intake_->arrived(message_cost(frame.payload.size()));
    return home_.deliver_on_loop(*this, intake_, frame.payload, {});
  }
  if (frame.type == kReply) return settle_on_loop(frame.id, decode_reply(frame));
  std::function<void(Reply)> answer;
  if (frame.id != 0) {
    answer = [weak = stream.weak_from_this(), id = frame.id](Reply reply) {
      if (auto to = weak.lock())
        to->send_on_loop(kReply, id, encode_reply(reply), reply.fd.valid() ? &reply.fd : nullptr);
    };
  } else if (frame.type == kPing) {
    answer = [&stream](Reply) { stream.send_on_loop(kPong, 0, {}); };
  }
  serve_request_on_loop(frame.type, frame.payload, std::move(frame.fds), std::move(answer));
}

// ---- The peer's requests ----

void Peer::serve_request_on_loop(uint16_t type, ByteView payload, std::vector<Fd> fds,
                                 std::function<void(Reply)> answer) {
  Reply reply;
  try {
    Reader in(payload);
    if (type == kDrop) {
      const RegionName name = RegionName::decode(in);
      home_.regions().find(name, 0);
      return home_.drop_on_loop(name.id, [answer](Status status) {
        if (answer) answer({std::move(status), {}, {}});
      });
    }
    reply = serve_on_loop(type, in, fds);
  } catch (const Error& error) {
    // A bad request is answered; bad framing, or a bad frame that wants no answer, ends the stream.
    if (!answer) throw;
    reply.status = error.status();
  }
  if (answer) answer(std::move(reply));
}

Reply Peer::serve_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds) {
  Reply reply;
  switch (type) {
    case kPing:
    case kPong:
      break;
    case kNotify: {
      const RegionName name = RegionName::decode(in);
      const auto value = in.get<uint64_t>();
      home_.regions().find(name, MR_WRITE)->notify(value);
      break;
    }
    case kAtomic: {
      const RegionName name = RegionName::decode(in);
      const auto offset = in.get<uint64_t>();
      const auto verb = static_cast<Verb>(in.get<uint8_t>());
      const auto a = in.get<uint64_t>(), b = in.get<uint64_t>();
      const RegionRef region =
          home_.regions().find(name, MR_READ | MR_WRITE, View::contiguous(offset, sizeof(uint64_t)));
      auto* const word = reinterpret_cast<uint64_t*>(region->base + offset);
      if (reinterpret_cast<uintptr_t>(word) % sizeof(uint64_t) != 0)
        throw Error(MR_OUT_OF_BOUNDS,
                    "offset " + std::to_string(offset) + " is not aligned to 8 bytes in the owner's memory");
      std::atomic_ref<uint64_t> cell(*word);
      uint64_t old = a;
      if (verb == Verb::fetch_add)
        old = cell.fetch_add(a);
      else if (verb == Verb::compare_and_swap)
        cell.compare_exchange_strong(old, b);
      else
        throw Error(MR_PROTOCOL, "unknown atomic " + std::to_string(static_cast<int>(verb)));
      reply.payload = Writer().put(old).take();
      break;
    }
    case kLookup:
      reply.payload = home_.lookup(in.text(kMaxText));
      break;
    case kCredit:
      credit_on_loop(in.get<uint64_t>());
      break;
    default:
      return serve_lane_on_loop(type, in, fds);
  }
  return reply;
}

Reply Peer::serve_lane_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds) {
  for (const auto& lane : *links()) {
    if (type < lane.first_frame || type >= lane.first_frame + kFramesPerLane || lane.first_frame == 0) continue;
    Reply reply;
    lane.link->on_frame_on_loop(type, in, fds, reply);
    return reply;
  }
  throw Error(MR_PROTOCOL, "unknown frame type " + std::to_string(type));
}

bool Peer::touches(uint64_t region_id) {
  const auto now = links();
  return std::any_of(now->begin(), now->end(), [&](const Lane& lane) { return lane.link->touches(region_id); });
}

std::string Peer::lane_name(const RemoteRegion& remote) {
  Op probe;
  probe.verb = (remote.access & MR_READ) != 0 ? Verb::read : Verb::write;
  probe.remote = std::make_shared<const RemoteRegion>(remote);
  for (const auto& lane : *links())
    if (lane.link->carries(probe) && lane.link->refuses(probe).empty()) return lane.link->lane_for(remote);
  return "";
}

}  // namespace mr
