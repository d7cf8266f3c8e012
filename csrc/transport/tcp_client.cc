#include "tcp_client.h"

#include <algorithm>
#include <bit>
#include <cassert>

#include "address.h"

namespace mr::tcp {
namespace {

constexpr uint64_t kLargeBytes = 8u << 20;  // operations from here on are worth more than one socket
constexpr uint32_t kMaxRepeats = 3;         // of one part
constexpr double kFastBytes = 1.25e9;       // a second: what is to be on its way at a time, in one round trip
constexpr double kWindowBytes = 2 << 20;  // of it on one socket: half of the send buffer that kernels allow themselves

bool is_same_host(LinkHost& host) { return !host.info().boot_id.empty() && host.info().boot_id == boot_id(); }
bool is_loopback(const HostPort& at) { return at.host == "::1" || at.host.starts_with("127."); }

bool is_large(const Transfer& transfer) { return transfer.op->bytes() >= kLargeBytes; }

Status stopped(int kind) { return fail(kind, kind == MR_TRANSFER_TIMEOUT ? "no end within its timeout" : "cancelled"); }

}  // namespace

Part Transfer::take_part() {
  if (!again.empty()) {
    const Part part = again.back();
    again.pop_back();
    return part;
  }
  const Part part{next, std::min(kPartBytes, op->bytes() - next)};
  next += part.length;
  cut = true;
  return part;
}

Client::Client(LinkHost& host, std::shared_ptr<Staging> staging)
    : host_(host),
      staging_(std::move(staging)),
      same_host_(is_same_host(host)),
      slots_(std::max(host.options().raw.tcp_sockets, host.options().raw.tcp_sockets_far)),
      num_worth_(host.options().raw.tcp_sockets),
      addresses_(data_addresses(host)) {}

// ---- Operations come and go ----

void Client::start(const OpRef& op) {
  assert(host_.loop().held());
  const auto transfer = std::make_shared<Transfer>(op);
  op->lane_state = transfer;
  if (op->block_sums.wanted()) op->block_sums.clear(op->bytes());  // another lane may have made some
  enqueue(transfer);
  open_sockets(is_large(*transfer));
  const auto self = shared_from_this();
  pump(true);
  deliver();
}

void Client::stop(const OpRef& op) {
  assert(host_.loop().held());
  const auto transfer = std::static_pointer_cast<Transfer>(op->lane_state);
  if (!transfer || transfer->ended) return;
  for (const auto& slot : slots_)
    if (slot.socket && !slot.socket->withdraw(transfer))
      slot.socket->give_up(fail(MR_CANCELLED, "closed in the middle of a write that was given up"));
  if (transfer->is_write()) ghosts_ += transfer->open;
  end(transfer, stopped(op->stop_kind));
  after_event();
}

void Client::put_fault(const Fault& fault) {
  for (const auto& slot : slots_)
    if (slot.socket) slot.socket->put_fault(fault);
}

void Client::close(const Status& why) {
  if (std::exchange(closed_, true)) return;
  for (auto& slot : slots_) {
    if (const auto dial = std::exchange(slot.dial, nullptr)) dial->stop();
    const auto socket = std::exchange(slot.socket, nullptr);
    if (!socket) continue;
    socket->close();
    for (const auto& posted : socket->take_posted())
      if (posted.transfer) end(posted.transfer, why);
  }
  for (auto* queue : {&small_, &large_})
    for (const auto& transfer : std::exchange(*queue, {})) end(transfer, why);
  for (const auto& [number, fence] : std::exchange(fences_, {}))
    for (const auto& orphan : fence.orphans) end(orphan.transfer, why);
  deliver();
}

void Client::after_event() {
  const auto self = shared_from_this();
  if (closed_) return;
  pump(false);
  deliver();
}

void Client::end(TransferRef transfer, Status status) {
  if (std::exchange(transfer->ended, true)) return;
  Op& op = *transfer->op;
  if (status.kind >= 0) {
    op.lane = "tcp";
    op.rails = static_cast<uint32_t>(std::popcount(transfer->sockets));
    if (transfer->is_write())
      op.remote_state = status.ok() ? MR_WRITTEN : transfer->maybe_written > 0 ? MR_UNKNOWN : MR_NOT_WRITTEN;
    if (status.ok()) host_.count(transfer->is_write() ? "tcp_write_bytes" : "tcp_read_bytes", op.bytes());
  }
  op.lane_state.reset();
  finished_.emplace_back(transfer->op, std::move(status));
}

// Last, when all of this is in order again: who hears of an end may start the next operation from there.
void Client::deliver() {
  while (!finished_.empty()) {
    auto [op, status] = std::move(finished_.front());
    finished_.pop_front();
    host_.on_done(op, std::move(status));
  }
}

// ---- Parts ----

void Client::enqueue(const TransferRef& transfer) {
  if (std::exchange(transfer->queued, true)) return;
  (is_large(*transfer) ? large_ : small_).push_back(transfer);
}

void Client::pump(bool patient) {
  if (ghosts_ == 0) {
    post_from(small_, false);
    post_from(large_, true);
  }
  for (const auto& slot : slots_)
    if (slot.socket && (!patient || slot.socket->worth_a_call())) slot.socket->flush();
}

void Client::post_from(std::deque<TransferRef>& queue, bool large) {
  while (!queue.empty()) {
    const TransferRef transfer = queue.front();
    if (transfer->has_parts()) {
      ClientSocket* const socket = socket_for(large);
      if (socket == nullptr) return;
      socket->post(transfer, transfer->take_part());
      ++transfer->open;
      transfer->sockets |= 1ull << socket->slot;
      if (!large) continue;  // else the others have their turn
    }
    queue.pop_front();
    if (transfer->has_parts())
      queue.push_back(transfer);
    else
      transfer->queued = false;
  }
}

// The first socket is for small operations, so that none waits behind a large one, unless there is no other.
ClientSocket* Client::socket_for(bool large) {
  ClientSocket* best = nullptr;
  bool others = false;
  for (size_t i = slots_.size(); i-- > 0;) {
    ClientSocket* const socket = slots_[i].socket.get();
    if (socket == nullptr || !socket->is_open()) continue;
    if (i == 0 && (large ? !others : true)) return socket->has_room() ? socket : nullptr;
    others = true;
    if (socket->has_room() && (best == nullptr || socket->bytes_posted() < best->bytes_posted())) best = socket;
  }
  return best;
}

void Client::part_resolved(Transfer& transfer) {
  --transfer.open;
  if (transfer.ended && transfer.is_write()) --ghosts_;
}

void Client::settle(const TransferRef& transfer) {
  if (transfer->open == 0 && !transfer->has_parts()) end(transfer, transfer->failure);
}

void Client::part_ended(const ClientSocket::Posted& posted, Status status, bool touched) {
  const TransferRef& transfer = posted.transfer;
  part_resolved(*transfer);
  if (status.ok()) {
    ++transfer->op->chunks;
  } else {
    if (posted.maybe_written && !touched) --transfer->maybe_written;
    if (transfer->failure.ok()) transfer->failure = std::move(status);
  }
  settle(transfer);
}

// ---- Sockets come and go ----

// Over loopback the bytes only change hands between two threads, one at each end. What several sockets hold for them is
// more than stays in the caches: one takes all that is large.
uint32_t Client::num_worth() const {
  const bool loopback = same_host_ && !addresses_.empty() && is_loopback(addresses_.front());
  return loopback ? std::min(num_worth_, 2u) : num_worth_;
}

void Client::open_sockets(bool large) {
  for (uint32_t i = 0; i < (large ? num_worth() : 1); ++i)
    if (!slots_[i].socket && !slots_[i].dial) dial(i);
}

void Client::dial(uint32_t slot) {
  slots_[slot].dial = std::make_shared<Dial>(host_, addresses_, &next_number_,
                                             [this, slot](std::optional<Dial::Opened> opened, Status why) {
                                               dialed(slot, std::move(opened), std::move(why));
                                             });
  const auto dial = slots_[slot].dial;
  dial->start();
}

void Client::dialed(uint32_t slot, std::optional<Dial::Opened> opened, Status why) {
  slots_[slot].dial.reset();
  if (opened) {
    try {
      auto socket = std::make_shared<ClientSocket>(*this, host_, staging_, std::move(opened->stream), opened->session,
                                                   opened->number, slot);
      socket->start();
      const double more = std::min(socket->round_trip() * kFastBytes / kWindowBytes, 64.0);
      const uint32_t enough = host_.options().raw.tcp_sockets + static_cast<uint32_t>(more);
      num_worth_ = std::min(std::max(num_worth_, enough), static_cast<uint32_t>(slots_.size()));
      slots_[slot].socket = std::move(socket);
      const auto same = [&](const HostPort& at) { return at.host == opened->at.host && at.port == opened->at.port; };
      std::stable_partition(addresses_.begin(), addresses_.end(), same);
      host_.count("tcp_sockets_opened", 1);
    } catch (const Error& error) {
      why = error.status();
    }
  }
  const bool hopeless = std::none_of(slots_.begin(), slots_.end(), [](const Slot& s) { return s.socket || s.dial; });
  if (hopeless) fail_queued(why);
  if (opened && !large_.empty()) open_sockets(true);
  after_event();
}

void Client::fail_queued(const Status& why) {
  for (auto* queue : {&small_, &large_}) {
    for (const auto& transfer : std::exchange(*queue, {})) {
      transfer->queued = false;
      if (!transfer->has_parts()) continue;
      const bool untouched = transfer->maybe_written == 0 && transfer->op->retries == 0;
      transfer->failure =
          fail(untouched ? kUnreachable : MR_PEER_LOST, "tcp: can't open a data socket (" + why.text + ")");
      settle(transfer);
    }
  }
}

// Called from within the socket; what follows waits until that has returned.
void Client::broken(ClientSocket& socket, const Status& why) {
  auto body = std::static_pointer_cast<ClientSocket>(socket.shared_from_this());
  host_.loop().post([weak = weak_from_this(), body = std::move(body), why] {
    const auto self = weak.lock();
    if (!self || self->closed_) return;
    self->bury(body, why);
    self->after_event();
  });
}

// At the other end: ours may look as if it were open, and say nothing for ever.
void Client::lost_by_peer(uint64_t session, uint64_t number) {
  for (const auto& slot : slots_)
    if (slot.socket && slot.socket->session == session && slot.socket->number == number)
      return slot.socket->give_up(fail(MR_PEER_LOST, "the peer has lost its end of the data socket"));
}

void Client::bury(const std::shared_ptr<ClientSocket>& socket, const Status& why) {
  host_.count("tcp_sockets_lost", 1);
  slots_[socket->slot].socket.reset();
  Fence fence{{}, why};
  for (const auto& posted : socket->take_posted()) {
    if (!posted.transfer) continue;
    if (posted.begun)
      fence.orphans.push_back({posted.transfer, posted.part});
    else
      post_again(posted.transfer, posted.part);
  }
  if (!fence.orphans.empty()) {
    fences_.emplace(socket->number, std::move(fence));
    host_.request_on_loop(kTcpFence, Writer().put(socket->session).put(socket->number).take(),
                          [weak = weak_from_this(), number = socket->number](const Reply& reply) {
                            const auto self = weak.lock();
                            if (!self || self->closed_) return;
                            self->fenced(number, reply.status);
                            self->after_event();
                          });
  }
  if (!small_.empty() || !large_.empty()) open_sockets(!large_.empty());
}

// The peer carries out nothing more of what that socket brought: what it may not have done can be asked for again.
void Client::fenced(uint64_t number, const Status& status) {
  const auto node = fences_.extract(number);
  if (node.empty()) return;
  const Status& why = node.mapped().why;
  for (auto [transfer, part] : node.mapped().orphans) {
    const bool ours = why.kind == MR_CANCELLED;  // we closed it: that is no reason to give up
    if (!status.ok()) {
      lose_part(transfer,
                fail(MR_PEER_LOST, "a data socket broke (" + why.text + ") and could not be fenced: " + status.text));
    } else if (why.kind == MR_PROTOCOL) {
      lose_part(transfer, why);
    } else if (!ours && part.repeats == kMaxRepeats) {
      lose_part(transfer, fail(MR_PEER_LOST, "its data socket broke " + std::to_string(kMaxRepeats + 1) +
                                                 " times, lastly: " + why.text));
    } else {
      part.repeats += !ours;
      if (!transfer->ended) ++transfer->op->retries;
      post_again(transfer, part);
    }
  }
  if (!small_.empty() || !large_.empty()) open_sockets(!large_.empty());
}

void Client::post_again(const TransferRef& transfer, const Part& part) {
  part_resolved(*transfer);
  if (transfer->ended) return;
  transfer->again.push_back(part);
  if (transfer->has_parts()) enqueue(transfer);
  settle(transfer);
}

void Client::lose_part(const TransferRef& transfer, Status why) {
  part_resolved(*transfer);
  if (transfer->ended) return;
  if (transfer->failure.ok()) transfer->failure = std::move(why);
  settle(transfer);
}

}  // namespace mr::tcp
