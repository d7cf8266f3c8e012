#include "tcp_socket.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

namespace mr::tcp {
namespace {

const View kNothing;
// Measured on 256 MiB over loopback, one socket: 192 to 512 KiB 6.7 GB/s, from 640 KiB on (as the kernel finds) 4.4,
// where what is on its way no longer stays in a cache of 1 MiB. To limit what the receiver may hold as well makes
// it 3.7.
constexpr int kLoopbackSendBuffer = 384 << 10;
constexpr uint64_t kMaxSend = kChunkBytes + kMaxRequestBytes + sizeof(Chunk);  // a whole chunk with its heads

// Between hosts the kernel finds the buffer sizes itself. On one host it makes this one larger than the caches, for
// nothing.
void limit_loopback_buffer(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return;
  const auto* const v4 = reinterpret_cast<const sockaddr_in*>(&peer);
  const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(&peer);
  const bool loopback = (peer.ss_family == AF_INET && (ntohl(v4->sin_addr.s_addr) >> 24) == IN_LOOPBACKNET) ||
                        (peer.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr));
  if (!loopback) return;
  (void)::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kLoopbackSendBuffer, sizeof kLoopbackSendBuffer);  // a wish
}

}  // namespace

Socket::Socket(LinkHost& host, std::shared_ptr<Staging> staging, Stream stream)
    : host_(host), staging_(std::move(staging)), stream_(std::move(stream)), payload_cursor_(kNothing) {}

void Socket::start() {
  limit_loopback_buffer(stream_.fd());
  watched_ = EPOLLIN;
  host_.loop().watch_on_loop(stream_.fd(), watched_, this);
  open_ = true;
}

void Socket::close() {
  if (!std::exchange(open_, false)) return;
  host_.loop().unwatch_on_loop(stream_.fd());
  stream_ = Stream(Fd());
  discard_payload();
}

void Socket::give_up(const Status& why) {
  if (!open_) return;
  close();
  on_broken(why);
}

void Socket::on_event(uint32_t events) {
  const auto self = shared_from_this();
  try {
    if ((events & ~uint32_t{EPOLLOUT}) != 0 || stream_.is_tls()) receive();
    // After an error too: the next write says which.
    blocked_ = blocked_ && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) == 0;
    send_some();
    watch_for();
    come_back();
    if ((std::exchange(dry_, false) && !blocked_) || (open_ && silent())) host_.loop().drained_on_loop(stream_.fd());
  } catch (const Error& error) {
    give_up(error.status());
  }
  after_event();
}

void Socket::flush() {
  if (!open_) return;
  try {
    send_some();
    watch_for();
  } catch (const Error& error) {
    give_up(error.status());
  }
}

void Socket::put_fault(const Fault& fault) {
  if (!open_ || fault.kind == MR_FAULT_CORRUPT) return;  // that is for control streams
  if (fault.kind == MR_FAULT_BREAK) {
    ::shutdown(stream_.fd(), SHUT_RDWR);  // both sides see the end
    return;
  }
  if (!fault_)
    fault_ = std::make_shared<FaultySocket>(host_.loop(), [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self) return;
      self->flush();
      self->come_back();
    });
  fault_->put(fault);
  watch_for();
}

void Socket::watch_for() {
  const bool reads = wants_to_read() && !silent(), writes = blocked_ && !(fault_ && fault_->mute());
  const uint32_t wanted = (reads ? EPOLLIN : 0u) | (writes ? EPOLLOUT : 0u);
  if (!open_ || wanted == watched_) return;
  host_.loop().change_on_loop(stream_.fd(), wanted);
  watched_ = wanted;
}

// What TLS has decrypted already, the loop knows nothing of.
void Socket::come_back() {
  if (!open_ || !stream_.pending() || !wants_to_read() || silent()) return;
  // As a timer, not a task: tasks run until there are none, and nobody else would have a turn.
  host_.loop().at_on_loop(Clock::now(), [weak = weak_from_this()] {
    if (const auto self = weak.lock(); self && self->open_) self->on_event(EPOLLIN);
  });
}

// ---- Incoming ----

void Socket::expect(uint8_t* base, const View& view, uint64_t position, uint64_t length) {
  payload_base_ = base;
  payload_cursor_ = Cursor(view, position);
  payload_left_ = length;
  payload_packed_ = view.run() < kPackBelow;
  if (length == 0) on_payload_end();
}

// The iovecs for the payload at hand, as far as it is not better packed.
int Socket::payload_parts(iovec* parts, uint64_t* bytes) const {
  int count = 0;
  if (payload_base_ == nullptr || payload_packed_) return 0;
  Cursor cursor = payload_cursor_;
  while (*bytes < payload_left_ && count < kMaxParts - 1) {
    const auto run = cursor.next(payload_left_ - *bytes);
    parts[count++] = {payload_base_ + run.offset, run.length};
    *bytes += run.length;
  }
  return count;
}

void Socket::receive() {
  uint64_t budget = kEventBytes;
  bool heard = false;
  while (budget > 0 && open_ && wants_to_read() && !silent()) {
    iovec parts[kMaxParts];
    uint64_t direct = 0;
    if (payload_left_ > 0) before_payload();
    int count = payload_parts(parts, &direct);
    size_t ahead = 0;
    if (direct == payload_left_)
      ahead = read_ahead();
    else if (direct == 0)
      ahead = kStagingBytes;
    if (ahead > 0) parts[count++] = {staging_->in.get(), ahead};

    const auto io = stream_.read(parts, count);
    if (io.bytes == 0) {
      dry_ = !io.closed;
      if (dry_) break;
      throw Error(MR_PEER_LOST, io.status.ok() ? "the peer closed the data socket" : io.status.text);
    }
    heard = true;
    if (fault_) fault_->took(io.bytes);
    const uint64_t straight = std::min<uint64_t>(io.bytes, direct);
    if (straight > 0) {
      payload_cursor_.seek(payload_cursor_.position() + straight);
      arrived(straight);
    }
    feed(staging_->in.get(), io.bytes - straight);
    budget -= std::min<uint64_t>(budget, io.bytes);
    dry_ = io.bytes < direct + ahead && !stream_.is_tls();
    if (dry_) break;  // the socket is empty
  }
  if (heard && open_) host_.heard_on_loop();
}

void Socket::feed(const uint8_t* data, size_t length) {
  while (length > 0) {
    if (payload_left_ > 0) {
      const size_t part = std::min<uint64_t>(length, payload_left_);
      if (payload_base_ != nullptr) store(data, part);
      data += part;
      length -= part;
      arrived(part);
      continue;
    }
    const size_t part = std::min(length, head_bytes(head_, head_have_) - head_have_);
    std::memcpy(head_ + head_have_, data, part);
    head_have_ += part;
    data += part;
    length -= part;
    if (head_have_ < head_bytes(head_, head_have_)) continue;
    head_have_ = 0;
    on_head(head_);
  }
}

void Socket::arrived(uint64_t length) {
  payload_left_ -= length;
  on_payload();
  if (payload_left_ == 0) on_payload_end();
}

void Socket::store(const uint8_t* data, size_t length) {
  while (length > 0) {
    const auto run = payload_cursor_.next(length);
    std::memcpy(payload_base_ + run.offset, data, run.length);
    data += run.length;
    length -= run.length;
  }
}

// ---- Sending ----

void Socket::send_some() {
  uint64_t budget = kEventBytes;
  while (open_ && !blocked_ && !(fault_ && fault_->mute())) {
    if (stream_.is_tls()) {
      if (!send_sealed(&budget)) return;
      continue;
    }
    Gather out(staging_->out.get(), kMaxSend);
    gather(out);
    if (out.bytes() == 0) return;
    const auto io = stream_.write(out.parts(), out.count());
    if (io.closed) throw Error(MR_PEER_LOST, io.status.text);
    sent(io.bytes);
    budget -= std::min<uint64_t>(budget, io.bytes);
    // With the budget used up the next round goes on: EPOLLOUT says at once that there is room.
    blocked_ = io.bytes < out.bytes() || budget == 0;
  }
}

// TLS may keep bytes that it didn't count: what it was offered once must not change, so it is offered a copy.
bool Socket::send_sealed(uint64_t* budget) {
  if (sealed_sent_ == sealed_.size()) {
    Gather out(staging_->out.get(), kStagingBytes);
    gather(out);
    if (out.bytes() == 0) return false;
    sealed_.clear();
    sealed_sent_ = 0;
    for (int i = 0; i < out.count(); ++i) {
      const auto* const data = static_cast<const uint8_t*>(out.parts()[i].iov_base);
      sealed_.insert(sealed_.end(), data, data + out.parts()[i].iov_len);
    }
    sent(sealed_.size());
  }
  const iovec rest{sealed_.data() + sealed_sent_, sealed_.size() - sealed_sent_};
  const auto io = stream_.write(&rest, 1);
  if (io.closed) throw Error(MR_PEER_LOST, io.status.text);
  sealed_sent_ += io.bytes;
  *budget -= std::min<uint64_t>(*budget, io.bytes);
  blocked_ = io.bytes == 0 || *budget == 0;
  return !blocked_;
}

}  // namespace mr::tcp
