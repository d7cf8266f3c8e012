#include "control.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cassert>
#include <cmath>

#include "address.h"

namespace mr {
namespace {

constexpr size_t kHeadBytes = 16;
constexpr uint16_t kCarriesFd = 1;
constexpr size_t kReadBytes = 64 << 10;
constexpr int kReadsPerEvent = 16;  // then others have their turn
constexpr int kPartsPerWrite = 64;
// Where more than so many of the largest frames wait as answers for a peer that does not read, its requests wait too.
// All else is still read: two that have much to tell each other would both stop reading, for ever. Above as many bytes
// of requests we do stop.
constexpr uint64_t kMaxWaitingFrames = 16;
constexpr size_t kMaxText = 4096, kMaxFds = 16;
constexpr double kDamages = 3;  // ways in which a frame is damaged on purpose

std::array<uint8_t, kHeadBytes> frame_head(uint16_t type, uint16_t flags, uint64_t id, size_t length) {
  std::array<uint8_t, kHeadBytes> out;
  const auto length32 = static_cast<uint32_t>(length);
  std::memcpy(out.data(), &length32, sizeof length32);
  std::memcpy(out.data() + 4, &type, sizeof type);
  std::memcpy(out.data() + 6, &flags, sizeof flags);
  std::memcpy(out.data() + 8, &id, sizeof id);
  return out;
}

ByteView bytes_of(std::string_view s) { return {reinterpret_cast<const uint8_t*>(s.data()), s.size()}; }

iovec part_of(ByteView bytes) { return {const_cast<uint8_t*>(bytes.data()), bytes.size()}; }

bool is_request(const Frame& frame) { return frame.id != 0 && frame.type != kReply; }

std::string versions(uint32_t theirs, uint32_t ours) {
  return "protocol version mismatch: the peer speaks version " + std::to_string(theirs) + ", this process version " +
         std::to_string(ours);
}

}  // namespace

void encode_info(const PeerInfo& info, Writer& out) {
  out.text(info.name).put(info.incarnation).text(info.boot_id).text(info.address).text(info.lanes);
  out.put(static_cast<uint8_t>(info.bulk_tls))
      .put(info.max_frame)
      .put(info.message_window)
      .put(static_cast<uint8_t>(info.tcp.size()));
  for (const auto& at : info.tcp) out.text(at.host).put(at.port);
}

PeerInfo decode_info(Reader& in) {
  PeerInfo info;
  info.name = in.text(kMaxText);
  info.incarnation = in.get<uint64_t>();
  info.boot_id = in.text(kMaxText);
  info.address = in.text(kMaxText);
  info.lanes = in.text(kMaxText);
  info.bulk_tls = in.get<uint8_t>() != 0;
  info.max_frame = in.get<uint64_t>();
  info.message_window = in.get<uint64_t>();
  for (int n = in.get<uint8_t>(); n > 0; --n) {
    HostPort at;
    at.host = in.text(kMaxText);
    at.port = in.get<uint16_t>();
    info.tcp.push_back(std::move(at));
  }
  return info;
}

ControlStream::ControlStream(Loop& loop, const Options& options, const PeerInfo& self, Stream stream, bool initiator,
                             Handler* handler)
    : loop_(loop),
      options_(options),
      self_(self),
      stream_(std::move(stream)),
      initiator_(initiator),
      handler_(handler),
      in_(kReadBytes) {}

void ControlStream::Handler::on_frame(ControlStream&, Frame&) {
  throw Error(MR_PROTOCOL, "a frame before the end of the hello");
}

ControlStream::~ControlStream() { assert(!watched_); }

void ControlStream::start_on_loop() {
  const auto self = shared_from_this();
  deadline_ = loop_.at_on_loop(after(options_.raw.connect_timeout), [this] {
    close_on_loop(
        fail(MR_PEER_LOST, "no answer to the hello within " + std::to_string(options_.raw.connect_timeout) + " s"),
        false);
  });
  if (!stream_.is_tls()) {
    ucred peer{};
    socklen_t length = sizeof peer;
    if (::getsockopt(stream_.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != ::geteuid())
      return close_on_loop(
          fail(MR_AUTHENTICATION, "the process at the other end belongs to user " + std::to_string(peer.uid) +
                                      ", this one to " + std::to_string(::geteuid())),
          false);
    info_.pid = peer.pid;
    info_.over_unix = true;
  }
  loop_.watch_on_loop(stream_.fd(), watching_ = EPOLLIN, this);
  watched_ = true;
  handshake_on_loop();
}

void ControlStream::handshake_on_loop() {
  const auto io = stream_.handshake();
  if (!io.status.ok() || io.closed)
    return close_on_loop(
        io.status.ok() ? fail(MR_AUTHENTICATION, "the peer closed the connection during the TLS handshake") : io.status,
        false);
  if (io.want == Tls::Want::nothing) {
    state_ = State::hello;
    if (initiator_) {
      hello_ = own_hello();
      send_on_loop(kHello, 0, hello_);
    }
  }
  if (state_ != State::closed) {
    loop_.change_on_loop(stream_.fd(),
                         watching_ = EPOLLIN | (io.want == Tls::Want::write || !out_.empty() ? EPOLLOUT : 0u));
    come_back_on_loop();
  }
}

void ControlStream::on_event(uint32_t events) {
  const auto self = shared_from_this();
  if (state_ == State::closed) return;
  if (state_ == State::tls) return handshake_on_loop();
  if ((events & EPOLLOUT) != 0) flush_on_loop();
  for (int i = 0; state_ != State::closed && i < kReadsPerEvent; ++i) {
    if (!may_read()) {
      if (silent()) loop_.drained_on_loop(stream_.fd());  // even the end of the stream is not to be seen
      return want_on_loop();
    }
    if (!read_on_loop()) {
      if (state_ != State::closed) loop_.drained_on_loop(stream_.fd());
      return;
    }
  }
  // Level-triggered epoll comes back by itself, but not for what TLS has read already.
  come_back_on_loop();
}

// As a timer, not a task: tasks run until there are none, and nobody else would have a turn.
void ControlStream::come_back_on_loop() {
  if (state_ == State::closed || !stream_.pending() || silent()) return;
  loop_.at_on_loop(Clock::now(), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->on_event(EPOLLIN);
  });
}

bool ControlStream::read_on_loop() {
  if (in_begin_ == in_end_) in_begin_ = in_end_ = 0;
  if (in_end_ == in_.size()) {
    std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
    in_end_ -= in_begin_;
    in_begin_ = 0;
  }
  const iovec part{in_.data() + in_end_, in_.size() - in_end_};
  const size_t fds_before = fds_.size();
  // The proof and the first frames with descriptors may arrive together.
  const bool may_bring_fds = info_.over_unix && (state_ == State::proof || state_ == State::up);
  const auto io = stream_.read(&part, 1, may_bring_fds ? &fds_ : nullptr);
  const bool took_fds = fds_.size() != fds_before;
  in_end_ += io.bytes;
  if (io.bytes > 0) {
    last_read_ = Clock::now();
    if (fault_) fault_->took(io.bytes);
    parse_on_loop();
  }
  if (state_ == State::closed) return false;
  if (io.closed || !io.status.ok()) {
    close_on_loop(io.status, false);
    return false;
  }
  // A short read of a socket has emptied it, but for one that ends where descriptors were attached.
  return io.bytes == part.iov_len || (io.bytes > 0 && (stream_.is_tls() || took_fds));
}

void ControlStream::parse_on_loop() {
  while (state_ != State::closed && in_end_ - in_begin_ >= kHeadBytes) {
    if (damage_ != 0 && state_ == State::up) damage_on_loop(in_.data() + in_begin_);
    Reader head({in_.data() + in_begin_, kHeadBytes});
    Frame frame;
    const uint64_t length = head.get<uint32_t>();
    frame.type = head.get<uint16_t>();
    const uint16_t flags = head.get<uint16_t>();
    frame.id = head.get<uint64_t>();
    const uint64_t limit = state_ == State::up ? options_.raw.max_frame_bytes : kMaxHelloBytes;
    if (length > limit)
      return close_on_loop(fail(MR_PROTOCOL, "a frame of " + std::to_string(length) + " bytes is over the limit of " +
                                                 std::to_string(limit) + " (option max_frame_bytes)"),
                           true);
    if (in_end_ - in_begin_ < kHeadBytes + length) {
      if (kHeadBytes + length > in_.size()) in_.resize(kHeadBytes + length);
      return;
    }
    frame.payload = {in_.data() + in_begin_ + kHeadBytes, length};
    if ((flags & kCarriesFd) != 0) {
      if (fds_.empty())
        return close_on_loop(fail(MR_PROTOCOL, "a frame announced a descriptor that did not come"), true);
      frame.fds.push_back(std::move(fds_.front()));
      fds_.erase(fds_.begin());
    }
    if (state_ == State::up && is_request(frame) && (!deferred_.empty() || !may_answer()))
      defer_on_loop(frame);
    else if (!carry_out_on_loop(frame))
      return;
    in_begin_ += kHeadBytes + length;
  }
  if (fds_.size() > kMaxFds) return close_on_loop(fail(MR_PROTOCOL, "descriptors that no frame announced"), true);
  if (in_begin_ == in_end_ && in_.size() > (1u << 20)) in_ = Bytes(kReadBytes);
}

bool ControlStream::carry_out_on_loop(Frame& frame) {
  try {
    on_frame_on_loop(frame);
    return true;
  } catch (const Error& error) {
    close_on_loop(error.status(), true);
  } catch (const std::exception& failure) {  // the frame must not be carried out a second time
    close_on_loop(fail(MR_RESOURCE_EXHAUSTED, failure.what()), true);
  }
  return false;
}

bool ControlStream::may_answer() const { return answer_bytes_ <= kMaxWaitingFrames * options_.raw.max_frame_bytes; }
bool ControlStream::may_read() const {
  return deferred_bytes_ <= kMaxWaitingFrames * options_.raw.max_frame_bytes && !silent();
}

void ControlStream::defer_on_loop(Frame& frame) {
  deferred_bytes_ += kHeadBytes + frame.payload.size();
  deferred_.push_back({frame.type, frame.id, {frame.payload.begin(), frame.payload.end()}, std::move(frame.fds)});
}

void ControlStream::serve_deferred_on_loop() {
  while (state_ == State::up && !deferred_.empty() && may_answer()) {
    Request request = std::move(deferred_.front());
    deferred_.pop_front();
    deferred_bytes_ -= kHeadBytes + request.payload.size();
    Frame frame{request.type, request.id, request.payload, std::move(request.fds)};
    if (!carry_out_on_loop(frame)) return;
  }
  want_on_loop();
}

void ControlStream::on_frame_on_loop(Frame& frame) {
  if (frame.type == kBye) {
    Reader in(frame.payload);
    const int kind = in.get<uint16_t>();
    const std::string text = in.text(kMaxText);
    const bool before_up = state_ != State::up;
    return close_on_loop(
        before_up ? fail(kind > MR_OK && kind <= MR_CONFIG ? kind : MR_PROTOCOL, "refused by the peer: " + text)
                  : fail(MR_PEER_LOST, "the peer closed the connection: " + text),
        false);
  }
  switch (state_) {
    case State::up:
      return handler_->on_frame(*this, frame);
    case State::hello:
      if (!initiator_ && frame.type == kHello) return on_hello_on_loop(frame);
      if (initiator_ && frame.type == kHelloReply) return on_hello_reply_on_loop(frame);
      break;
    case State::proof:
      if (frame.type == kHelloProof) return on_hello_proof_on_loop(frame);
      break;
    default:
      break;
  }
  throw Error(MR_PROTOCOL, "frame type " + std::to_string(frame.type) + " in the middle of the hello");
}

Bytes ControlStream::own_hello() const {
  Writer out;
  Bytes nonce(32);
  random_bytes(nonce.data(), nonce.size());
  out.put(kMagic).put(static_cast<uint16_t>(options_.raw.protocol_version)).raw(nonce);
  encode_info(self_, out);
  return out.take();
}

// Version first: it must be readable for every version to come.
void ControlStream::read_hello(Reader& in) {
  if (in.get<uint32_t>() != kMagic) throw Error(MR_PROTOCOL, "the other side does not speak this protocol");
  if (const uint32_t version = in.get<uint16_t>(); version != options_.raw.protocol_version)
    throw Error(MR_PROTOCOL, versions(version, options_.raw.protocol_version));
  in.raw(32);
  const int pid = info_.pid;
  const bool over_unix = info_.over_unix;
  info_ = decode_info(in);
  info_.pid = pid;
  info_.over_unix = over_unix;
}

void ControlStream::establish_on_loop(ByteView client, ByteView server) {
  Writer transcript;
  transcript.blob(client).blob(server).raw(stream_.binding("EXPORTER-monarch_rdma control"));
  session_key_ = options_.secret.derive("session", transcript.bytes());
  const Digest id = hmac_sha256(session_key_, bytes_of("id"));
  std::memcpy(&session_id_, id.data(), sizeof session_id_);
}

void ControlStream::on_hello_on_loop(Frame& frame) {
  const Bytes client(frame.payload.begin(), frame.payload.end());
  Reader in(frame.payload);
  read_hello(in);
  in.end();
  hello_ = own_hello();
  establish_on_loop(client, hello_);
  Writer out;
  out.blob(hello_).raw(hmac_sha256(session_key_, bytes_of("server")));
  state_ = State::proof;
  send_on_loop(kHelloReply, 0, out.bytes());
}

void ControlStream::on_hello_reply_on_loop(Frame& frame) {
  Reader in(frame.payload);
  const ByteView server = in.blob(kMaxHelloBytes);
  const ByteView proof = in.raw(sizeof(Digest));
  in.end();
  Reader hello(server);
  read_hello(hello);
  hello.end();
  establish_on_loop(hello_, server);
  if (!equal_constant_time(proof, hmac_sha256(session_key_, bytes_of("server"))))
    throw Error(MR_AUTHENTICATION, "the process at the other end does not know this job's secret");
  send_on_loop(kHelloProof, 0, hmac_sha256(session_key_, bytes_of("client")));
  become_up_on_loop();
}

void ControlStream::on_hello_proof_on_loop(Frame& frame) {
  if (!equal_constant_time(frame.payload, hmac_sha256(session_key_, bytes_of("client"))))
    throw Error(MR_AUTHENTICATION, "the process at the other end does not know this job's secret");
  become_up_on_loop();
}

void ControlStream::become_up_on_loop() {
  if (state_ == State::closed) return;
  state_ = State::up;
  loop_.cancel_on_loop(deadline_);
  handler_->on_up(*this);
}

void ControlStream::send_on_loop(uint16_t type, uint64_t id, ByteView payload, const Fd* pass_fd, ByteView more) {
  if (state_ == State::closed) return;
  Out out;
  if (pass_fd) {
    out.pass = Fd(::fcntl(pass_fd->get(), F_DUPFD_CLOEXEC, 0));
    if (!out.pass.valid())
      throw Error(MR_RESOURCE_EXHAUSTED, "can't duplicate a descriptor (raise `ulimit -n`)", errno);
  }
  const auto head = frame_head(type, pass_fd ? kCarriesFd : uint16_t{0}, id, payload.size() + more.size());
  // What the socket takes at once is not copied.
  size_t skip = 0;
  bool flush = out_.empty() && !mute();
  if (flush && !pass_fd && state_ == State::up) {
    const iovec parts[] = {part_of(head), part_of(payload), part_of(more)};
    const auto io = stream_.write(parts, 3);
    skip = io.bytes;
    if (skip == head.size() + payload.size() + more.size()) return;
    flush = io.closed || !io.status.ok();  // which meets the failure again, and deals with it
  }
  out.bytes.reserve(head.size() + payload.size() + more.size() - skip);
  for (ByteView piece : {ByteView(head), payload, more}) {
    const size_t skipped = std::min(skip, piece.size());
    skip -= skipped;
    out.bytes.insert(out.bytes.end(), piece.begin() + static_cast<ptrdiff_t>(skipped), piece.end());
  }
  if (type == kReply) answer_bytes_ += out.answer = out.bytes.size();
  out_.push_back(std::move(out));
  flush ? flush_on_loop() : want_on_loop();
}

void ControlStream::drain_on_loop() {
  const auto self = shared_from_this();
  while (state_ == State::up && !silent() && read_on_loop()) {
  }
}

void ControlStream::put_fault_on_loop(const Fault& fault) {
  if (state_ == State::closed) return;
  if (fault.kind == MR_FAULT_BREAK) {
    ::shutdown(stream_.fd(), SHUT_RDWR);  // both sides see the end
  } else if (fault.kind == MR_FAULT_CORRUPT) {
    damage_ = 1 + static_cast<uint32_t>(std::fmod(fault.amount, kDamages));
  } else {
    if (!fault_)
      fault_ = std::make_shared<FaultySocket>(loop_, [weak = weak_from_this()] {
        const auto self = weak.lock();
        if (!self || self->state_ == State::closed) return;
        self->flush_on_loop();
        self->come_back_on_loop();
      });
    fault_->put(fault);
    want_on_loop();
  }
}

// Only what is sure to be found: a damaged number inside would be another number. What secures the bytes themselves is
// TLS, or the kernel.
void ControlStream::damage_on_loop(uint8_t* head) {
  const uint16_t no_type = 0xffff;
  const uint64_t no_request = 0;
  const uint32_t no_length = 0xffffffff;
  const uint16_t flags = kCarriesFd;
  const uint32_t damage = std::exchange(damage_, 0);
  if (damage == 1) {
    std::memcpy(head + 4, &no_type, sizeof no_type);
    std::memcpy(head + 8, &no_request, sizeof no_request);
  } else if (damage == 2 && fds_.empty()) {
    std::memcpy(head + 6, &flags, sizeof flags);
  } else {
    std::memcpy(head, &no_length, sizeof no_length);
  }
}

void ControlStream::flush_on_loop() {
  while (!mute() && !out_.empty() && state_ != State::closed) {
    iovec parts[kPartsPerWrite];
    int count = 0;
    // A descriptor travels with the first byte of a write, so the frame that has one begins a write of its own.
    for (auto& out : out_) {
      if (count == kPartsPerWrite || (count > 0 && out.pass.valid())) break;
      parts[count++] = {out.bytes.data() + out.sent, out.bytes.size() - out.sent};
    }
    const auto io = stream_.write(parts, count, out_.front().pass.get());
    if (io.bytes > 0) out_.front().pass.reset();
    for (size_t left = io.bytes; left > 0;) {
      Out& front = out_.front();
      const size_t taken = std::min(left, front.bytes.size() - front.sent);
      front.sent += taken;
      left -= taken;
      if (front.sent < front.bytes.size()) continue;
      answer_bytes_ -= front.answer;
      out_.pop_front();
    }
    if (io.closed || !io.status.ok()) {
      // What the peer said before it went (a goodbye with a reason) may still be unread: the read side tells the end.
      out_.clear();
      answer_bytes_ = 0;
      // But where only a limit of this host was met, the stream lives on without what it lost.
      if (io.status.kind == MR_RESOURCE_EXHAUSTED)
        loop_.post([self = shared_from_this(), why = io.status] { self->close_on_loop(why, false); });
      break;
    }
    if (io.bytes == 0) break;
  }
  if (!deferred_.empty() && may_answer()) loop_.post([self = shared_from_this()] { self->serve_deferred_on_loop(); });
  want_on_loop();
}

void ControlStream::want_on_loop() {
  if (state_ == State::closed || !watched_) return;
  const uint32_t want = (may_read() ? EPOLLIN : 0u) | (out_.empty() || mute() ? 0u : EPOLLOUT);
  if (want != watching_) loop_.change_on_loop(stream_.fd(), watching_ = want);
}

void ControlStream::close_on_loop(const Status& status, bool say_why) {
  if (state_ == State::closed) return;
  const auto self = shared_from_this();
  if (say_why && watched_ && state_ != State::tls) {
    Writer out;
    out.put(static_cast<uint16_t>(status.kind)).text(std::string_view(status.text).substr(0, kMaxText));
    send_on_loop(kBye, 0, out.bytes());
  }
  state_ = State::closed;
  loop_.cancel_on_loop(deadline_);
  if (std::exchange(watched_, false)) loop_.unwatch_on_loop(stream_.fd());
  stream_.shutdown();
  out_.clear();
  deferred_.clear();
  fds_.clear();
  handler_->on_closed(*this, status);
  loop_.post([self] { self->stream_ = Stream(Fd()); });  // closed after whoever is in this object has left
}

}  // namespace mr
