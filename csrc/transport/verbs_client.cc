#include "verbs_client.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace mr {
namespace {

constexpr uint64_t kSmall = 64u << 10;  // operations up to this size go out as one request of the calling thread
constexpr uint64_t kWindowChunks = 4;   // posted on one queue pair: the card never runs dry
constexpr double kStopGrace = 0.02;     // what is posted may end by itself so long, before its queue pair is shut
constexpr uint32_t kPerDoorbell = 32;
constexpr uint32_t kForEver = 7;  // retries, to some cards
constexpr double kLookEvery = 0.5;

// A packet that is lost each time is given up within (retries + 1) timeouts, each of which may take four times as long.
std::chrono::nanoseconds hardware_limit(const mr_options& raw) {
  if (raw.verbs_timeout == 0 || raw.verbs_retries == kForEver) return {};
  return std::chrono::nanoseconds(4096) * (int64_t{1} << raw.verbs_timeout) * 4 * (raw.verbs_retries + 1);
}

}  // namespace

VerbsClient::VerbsClient(LinkHost& host, std::shared_ptr<VerbsDomain> domain)
    : host_(host),
      loop_(host.loop()),
      domain_(std::move(domain)),
      hardware_limit_(hardware_limit(domain_->options().raw)),
      rails_(domain_->rails().size()),
      near_(domain_->near_rails().num_orders()) {
  for (RailState& rail : rails_) rail.slots.resize(domain_->options().raw.verbs_queue_pairs);
}

VerbsClient::~VerbsClient() = default;

Status VerbsClient::stopped(int kind) {
  return fail(kind, kind == MR_TRANSFER_TIMEOUT ? "no end within its timeout" : "cancelled");
}

// ---- Small operations, by the calling thread ----

bool VerbsClient::try_inline(const OpRef& op) {
  if (!post_small(op)) return false;
  if (!watched_.load()) watch_small();
  return true;
}

bool VerbsClient::post_small(const OpRef& ref) {
  Op& op = *ref;
  const bool atomic = is_atomic(op.verb), write = op.verb == Verb::write;
  const uint64_t length = atomic ? sizeof(uint64_t) : op.bytes();
  if (length == 0 || length > kSmall || !op.remote_view.is_contiguous() || !op.local_view.is_contiguous()) return false;
  if (!atomic && !write && op.verb != Verb::read) return false;
  if (op.local_device >= 0) return false;  // these pass through a processor, which does not reach memory of a device
  // It has no timer. Deadlines are looked at now and then, for what the card does not end, and not so soon.
  if (hardware_limit_.count() == 0) return false;
  if (op.deadline != Time::max() && op.deadline - op.submitted < hardware_limit_) return false;

  struct Inside {
    explicit Inside(std::atomic<uint32_t>& count) : count(count) { count.fetch_add(1); }
    ~Inside() { count.fetch_sub(1); }
    std::atomic<uint32_t>& count;
  } inside(inside_);
  Near& near = near_[domain_->near_rails().here()];
  Route* const route = near.route.load();
  VerbsKeyCache::Found keys;
  if (route == nullptr || !key_cache_.find(op.remote->name, route->their_rail, &keys)) return false;
  const uint64_t offset = op.remote_view.offset();
  if (offset > keys.size || length > keys.size - offset) return false;
  if (atomic && (!keys.atomics || (keys.base + offset) % sizeof(uint64_t) != 0)) return false;

  Work work;
  uint8_t* const here = op.local + op.local_view.offset();
  const bool inlined = write && length <= route->pair->limits().max_inline;
  ibv_sge piece{reinterpret_cast<uintptr_t>(here), static_cast<uint32_t>(length), 0};
  if (!inlined && !atomic) {
    work.local = route->card->memory.find(piece.addr, length);
    if (work.local && work.local->until_seam(piece.addr) < length) work.local.reset();
    if (work.local) piece.lkey = work.local->lkey(piece.addr);
  }
  if (!inlined && !work.local && length > StagingBlocks::kBlock) return false;
  QueuePair::Batch batch(*route->pair, false);
  if (!batch.has_room()) return false;
  if (!inlined && !work.local) {
    work.staging = route->card->staging;
    work.staged = work.staging->take();
    if (work.staged == nullptr) return false;
    if (write) std::memcpy(work.staged, here, length);
    piece.addr = reinterpret_cast<uintptr_t>(work.staged);
    piece.lkey = work.staging->lkey();
  }
  if (near.is_far.load(std::memory_order_relaxed)) near.used_far.store(true, std::memory_order_relaxed);
  op.lane = "verbs";
  op.chunks.store(1, std::memory_order_relaxed);
  op.rails.store(1, std::memory_order_relaxed);
  op.set_helper(route->pair);
  work.op = ref;
  work.owner = op.peer.lock();
  work.length = length;
  work.kind = atomic ? kAtomicWork : kSmallWork;
  const uint64_t remote = keys.base + offset;
  if (atomic)
    batch.add_atomic(std::move(work),
                     op.verb == Verb::fetch_add ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP, piece,
                     remote, keys.rkey, op.operand[0], op.operand[1]);
  else
    batch.add(std::move(work), write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, {&piece, 1}, remote, keys.rkey, inlined);
  return true;
}

// Whoever posts looks at watched_ afterwards: either it asks for the next look, or that sees its request.
void VerbsClient::watch_small() {
  if (watched_.exchange(true)) return;
  loop_.run([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->look_at_deadlines();
  });
}

// As long as something goes on, and in time for the first deadline: an operation is posted here only if it has more
// time than there is between two looks.
void VerbsClient::look_at_deadlines() {
  if (closed_) return;
  open_nearer();
  Time first = end_overdue();
  uint64_t posted = 0;
  for (const auto& [pair, connection] : by_pair_) posted += pair->num_posted();
  if (std::exchange(posted_at_last_look_, posted) == posted && first == Time::max()) {
    watched_.store(false);
    first = end_overdue();
    if (first == Time::max() || watched_.exchange(true)) return;
  }
  const double pause = std::clamp(std::chrono::duration<double>(hardware_limit_).count(), 0.01, kLookEvery);
  loop_.at_on_loop(std::min(first, after(pause)), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->look_at_deadlines();
  });
}

// What is posted can be taken back in one way only. Returns the first deadline of those that are not overdue.
Time VerbsClient::end_overdue() {
  Time first = Time::max();
  std::vector<ConnectionRef> overdue;
  for (const auto& [pair, connection] : by_pair_) {
    const Time here = connection->pair->first_deadline();
    if (here > Clock::now())
      first = std::min(first, here);
    else
      overdue.push_back(connection);
  }
  for (const auto& connection : overdue)
    lose(connection, fail(MR_CANCELLED, "shut to end an operation whose time is up"), false);
  return first;
}

void VerbsClient::stop_inline(int kind) {
  for (const auto& [pair, connection] : by_pair_) connection->pair->stop_small(kind);
  end_overdue_soon();
}

void VerbsClient::end_overdue_soon() {
  loop_.at_on_loop(after(kStopGrace), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->end_overdue();
  });
}

void VerbsClient::end_small(Work& work, Status&& status) {
  Op& op = *work.op;
  if (work.staged != nullptr) {
    if (status.ok() && work.kind == kAtomicWork) std::memcpy(&op.value, work.staged, sizeof op.value);
    if (status.ok() && op.verb == Verb::read) {
      std::memcpy(op.local + op.local_view.offset(), work.staged, work.length);
      host_.count("verbs_staged_bytes", work.length);
    }
    work.staging->give_back(work.staged);
    work.staged = nullptr;
  }
  if (status.ok()) {
    if (op.verb != Verb::read) op.remote_state = MR_WRITTEN;
    host_.count(op.verb == Verb::read ? "verbs_read_bytes" : "verbs_write_bytes", work.length);
  }
  host_.on_done(work.op, std::move(status));
}

// ---- Operations come and go ----

void VerbsClient::start(const OpRef& op) {
  assert(loop_.held());
  if (!is_blocked() && try_inline(op)) return;
  const VerbsTransferRef transfer = begin(op);
  ask_rails();
  open_some(op->bytes() >= kLargeBytes);
  attempt(transfer);
  if (is_waiting(*transfer)) enqueue(transfer);
}

VerbsTransferRef VerbsClient::begin(const OpRef& op) {
  const auto transfer = std::make_shared<VerbsTransfer>(op, rails_.size());
  op->lane_state = transfer;
  op->set_helper(shared_from_this());
  return transfer;
}

bool VerbsClient::is_waiting(const VerbsTransfer& transfer) {
  return !transfer.ended && transfer.failure.ok() && (transfer.has_work() || transfer.op->bytes() == 0);
}

void VerbsClient::enqueue(const VerbsTransferRef& transfer) {
  if (std::exchange(transfer->queued, true)) return;
  if (is_large(*transfer))
    large_.push_back(transfer);
  else if (transfer->may_register)
    small_.push_front(transfer);
  else
    small_.push_back(transfer);
}

void VerbsClient::stop(const OpRef& op) {
  assert(loop_.held());
  const auto transfer = std::static_pointer_cast<VerbsTransfer>(op->lane_state);
  if (!transfer) return end_overdue_soon();  // it ended, or try_inline has posted it
  if (transfer->ended) return;
  transfer->drop_work();
  if (transfer->failure.ok()) transfer->failure = stopped(op->stop_kind);
  settle(transfer);
  if (transfer->ended) return;
  loop_.at_on_loop(after(kStopGrace), [weak = weak_from_this(), transfer] {
    if (const auto self = weak.lock()) self->break_off(transfer);
  });
}

// What is posted can be taken back in one way only.
void VerbsClient::break_off(const VerbsTransferRef& transfer) {
  if (transfer->ended) return;
  std::vector<ConnectionRef> carriers;
  for (const auto& [number, connection] : connections_)
    if (connection->carries.count(transfer.get()) != 0) carriers.push_back(connection);
  for (const auto& connection : carriers)
    lose(connection, fail(MR_CANCELLED, "shut to end an operation that was given up"), false);
}

void VerbsClient::settle(const VerbsTransferRef& transfer) {
  if (transfer->open > 0 || transfer->ended || transfer->has_work()) return;
  if (transfer->failure.ok() && transfer->op->bytes() == 0) return;  // nothing was asked of the peer yet
  end(transfer, transfer->failure);
}

void VerbsClient::end(const VerbsTransferRef& transfer, Status status) {
  if (std::exchange(transfer->ended, true)) return;
  Op& op = *transfer->op;
  if (status.kind >= 0) {
    op.lane = "verbs";
    op.rails = static_cast<uint32_t>(std::popcount(transfer->rails));
    if (transfer->is_write())
      op.remote_state = status.ok() ? MR_WRITTEN : transfer->begun ? MR_UNKNOWN : MR_NOT_WRITTEN;
    if (status.ok()) host_.count(transfer->is_write() ? "verbs_write_bytes" : "verbs_read_bytes", op.bytes());
  }
  op.set_helper(nullptr);
  op.lane_state.reset();
  transfer->drop_work();
  let_others_register(*transfer);
  host_.on_done(transfer->op, std::move(status));
}

// No rail can take it: the next lane may.
void VerbsClient::give_up(const VerbsTransferRef& transfer) {
  Op& op = *transfer->op;
  for (const auto& at : transfer->local)
    if (at.state == VerbsTransfer::Local::failed && (op.flags & MR_STRICT) != 0) return end(transfer, at.why);
  end(transfer, fail(kUnreachable, "verbs: " + why_unusable(*transfer)));
}

// ---- Requests go out ----

void VerbsClient::pump() {
  if (is_blocked() || closed_) return;
  waits_for_room_.store(true);  // before the look, so that room made meanwhile is told of
  pump_small();
  // A large one gives way after each batch, so that those that began at the same time end about the same time.
  for (size_t idle = 0; idle < large_.size();) {
    const VerbsTransferRef transfer = large_.front();
    large_.pop_front();
    const bool posted = post_some(transfer);
    if (has_left(transfer)) continue;
    idle = posted ? 0 : idle + 1;
    large_.push_back(transfer);
    if (!posted && is_full(true)) break;
  }
  if (small_.empty() && large_.empty()) waits_for_room_.store(false);
}

// Those that may register come first. Behind one that has to wait for that nothing is looked at.
void VerbsClient::pump_small() {
  registers_in_turn_ = false;
  std::vector<VerbsTransferRef> tried;
  while (!small_.empty() && !registers_in_turn_) {
    const VerbsTransferRef transfer = small_.front();
    small_.pop_front();
    while (post_some(transfer)) continue;
    if (has_left(transfer)) continue;
    tried.push_back(transfer);
    if (is_full(false)) break;
  }
  small_.insert(small_.begin(), tried.begin(), tried.end());
}

// Of a queue: nothing of it is left to post.
bool VerbsClient::has_left(const VerbsTransferRef& transfer) {
  if (is_waiting(*transfer)) return false;
  transfer->queued = false;
  settle(transfer);
  return true;
}

// This one alone: where thousands wait, looking at all of them for each would take for ever.
void VerbsClient::attempt(const VerbsTransferRef& transfer) {
  if (is_blocked() || closed_) return;
  waits_for_room_.store(true);
  while (post_some(transfer)) continue;
  if (!is_waiting(*transfer)) settle(transfer);
}

bool VerbsClient::post_some(const VerbsTransferRef& transfer) {
  if (transfer->ended || !transfer->failure.ok()) return false;
  const OpRef& op = transfer->op;
  if (is_small(*transfer)) {
    op->lane_state.reset();  // once it is posted it may end at any time
    if (try_inline(op)) {
      transfer->ended = true;
      let_others_register(*transfer);
      return true;
    }
    op->lane_state = transfer;
  }
  if (Connection* const connection = choose(transfer)) {
    if (op->bytes() > 0) return post_on(*connection, transfer);
    end(transfer, {});
    return true;
  }
  if (transfer->failure.ok() && transfer->open == 0 && !worth_waiting(*transfer)) give_up(transfer);
  return false;
}

VerbsClient::Connection* VerbsClient::choose(const VerbsTransferRef& transfer) {
  const bool large = is_large(*transfer);
  Connection* best = nullptr;
  for (const size_t r : order_here()) {
    if (!large && best != nullptr) break;
    if (!may_use(r) || !is_up(r)) continue;
    Connection* const here = idlest(r, large);
    // A small one goes out at once when there is room: it is not worth a registration before.
    if ((here == nullptr && is_small(*transfer)) || !prepare(transfer, r)) continue;
    if (here == nullptr || (large && leaves_to_others(*transfer, r))) continue;
    if (best == nullptr || here->bytes < best->bytes) best = here;
  }
  return best;
}

// The first rail whose keys and registration are at hand would take all of a transfer while the others get theirs. It
// takes its share and leaves them theirs, for as long as it is at it.
bool VerbsClient::leaves_to_others(VerbsTransfer& transfer, size_t rail) {
  if (transfer.is_dealt_out) return false;
  uint64_t sharers = 0;
  bool others_come = false;
  for (size_t r = 0; r < rails_.size(); ++r) {
    const VerbsTransfer::AtRail& at = transfer.local[r];
    if (!may_use(r) || !is_up(r) || at.state == VerbsTransfer::Local::failed) continue;
    ++sharers;
    const auto* keys = keys_.find(transfer.op->remote->name, static_cast<uint32_t>(rails_[r].path.theirs));
    others_come |= at.state != VerbsTransfer::Local::here || keys == nullptr || !keys->known;
  }
  const uint64_t half_a_request = domain_->options().raw.verbs_chunk_bytes / 2;
  if (!others_come || transfer.local[rail].taken + half_a_request < transfer.op->bytes() / sharers) return false;
  const auto& slots = rails_[rail].slots;
  transfer.is_dealt_out = std::none_of(slots.begin(), slots.end(), [&](const ConnectionRef& each) {
    return each && each->carries.count(&transfer) != 0;
  });
  return !transfer.is_dealt_out;
}

bool VerbsClient::is_up(size_t rail) const {
  const auto& slots = rails_[rail].slots;
  return std::any_of(slots.begin(), slots.end(),
                     [](const ConnectionRef& each) { return each && each->state == Connection::up; });
}

// Of a rail's queue pairs that have room. The first is kept for small operations where there are others.
VerbsClient::Connection* VerbsClient::idlest(size_t rail, bool large) const {
  const uint64_t window = kWindowChunks * domain_->options().raw.verbs_chunk_bytes;
  const auto& slots = rails_[rail].slots;
  const auto is_up = [](const ConnectionRef& each) { return each && each->state == Connection::up; };
  const bool others = std::any_of(slots.begin() + 1, slots.end(), is_up);
  Connection* best = nullptr;
  for (size_t s = large && others ? 1 : 0; s < slots.size(); ++s) {
    if (!is_up(slots[s])) continue;
    Connection& connection = *slots[s];
    QueuePair& pair = *connection.pair;
    if (connection.bytes >= window || pair.outstanding() >= pair.limits().depth || pair.is_broken()) continue;
    if (best == nullptr || connection.bytes < best->bytes) best = &connection;
  }
  return best;
}

// All queue pairs have as much as they take: no operation can be posted before some of that ends.
bool VerbsClient::is_full(bool large) const {
  bool any = false;
  for (size_t r = 0; r < rails_.size(); ++r) {
    if (!may_use(r) || !is_up(r)) continue;
    if (idlest(r, large) != nullptr) return false;
    any = true;
  }
  return any;
}

bool VerbsClient::is_large(const VerbsTransfer& transfer) { return transfer.op->bytes() >= kLargeBytes; }

bool VerbsClient::is_small(const VerbsTransfer& transfer) {
  return !transfer.begun && transfer.op->bytes() <= kSmall && transfer.op->local_device < 0;
}

// True where both keys are at hand; else they are on their way, or will never come.
bool VerbsClient::prepare(const VerbsTransferRef& transfer, size_t rail) {
  if (is_small(*transfer) && keys_for(transfer, rail) == nullptr) return false;
  auto& local = transfer->local[rail];
  const bool is_of_another_card = local.registration && local.registration->domain() != rails_[rail].card->domain.get();
  if (local.registration && (is_of_another_card || local.registration->is_revoked())) local = {};
  if (local.state == VerbsTransfer::Local::unknown && takes_turn_to_register(*transfer)) register_local(transfer, rail);
  const bool has_keys = local.state != VerbsTransfer::Local::failed && keys_for(transfer, rail) != nullptr;
  return has_keys && local.state == VerbsTransfer::Local::here && transfer->failure.ok();
}

const VerbsKeys* VerbsClient::keys_for(const VerbsTransferRef& transfer, size_t rail) {
  const RegionName& name = transfer->op->remote->name;
  const auto theirs = static_cast<uint32_t>(rails_[rail].path.theirs);
  VerbsKeyBook::Entry* entry = keys_.find(name, theirs);
  if (entry != nullptr && entry->known) {
    if (transfer->op->remote_view.fits(entry->keys.size)) return &entry->keys;
    transfer->failure =
        fail(MR_OUT_OF_BOUNDS, "it leaves the region, which has " + std::to_string(entry->keys.size) + " bytes");
    return nullptr;
  }
  if (entry == nullptr) {
    entry = &keys_.ask(name, theirs);
    const uint32_t right = transfer->is_write() ? MR_WRITE : MR_READ;
    host_.send_on_loop(kVerbsWant, VerbsWant{entry->number, name, right, theirs}.encode());
  }
  entry->waiting.insert(transfer);
  return nullptr;
}

void VerbsClient::on_keys(VerbsKeys keys) {
  VerbsKeyBook::Entry* const entry = keys_.asked(keys.number);
  if (entry == nullptr) return;
  const auto waiting = std::exchange(entry->waiting, {});
  if (keys.status.ok()) {
    entry->known = true;
    entry->keys = std::move(keys);
    key_cache_.put(entry->name, entry->rail, entry->keys);
  } else {
    // What the owner can't register another lane may reach; all else is about the operation.
    const bool another_lane = keys.status.kind == MR_REGISTRATION || keys.status.kind == MR_RESOURCE_EXHAUSTED;
    const Status theirs = fail(keys.status.kind, "the owner's " + keys.status.text);
    for (size_t r = 0; r < rails_.size() && another_lane; ++r) {
      if (!rails_[r].reaches || rails_[r].path.theirs != entry->rail) continue;
      for (const auto& transfer : waiting) transfer->local[r] = {VerbsTransfer::Local::failed, nullptr, theirs};
      // Nothing that we could post would tell: its queue pairs are gone with it, and come back with new ones of ours.
      if (is_of_dead_card(keys.status) && is_up(r)) lose_rail(r, theirs);
    }
    for (const auto& transfer : waiting)
      if (!another_lane && transfer->failure.ok()) transfer->failure = keys.status;
    keys_.erase(*entry);
    if (another_lane) open_some(true);  // at another rail it may be possible
  }
  pump();
}

void VerbsClient::on_gone(uint64_t region) {
  keys_.forget(region);
  key_cache_.forget(region);
}

// Cards know so many regions and no more, and thousands of operations can wait for a queue pair with room.
bool VerbsClient::takes_turn_to_register(VerbsTransfer& transfer) {
  if (is_large(transfer) || transfer.may_register) return true;
  registers_in_turn_ = registering_ >= kMaxRegistering;
  if (registers_in_turn_) return false;
  ++registering_;
  return transfer.may_register = true;
}

void VerbsClient::let_others_register(VerbsTransfer& transfer) {
  if (!std::exchange(transfer.may_register, false)) return;
  --registering_;
  if (!std::exchange(registers_in_turn_, false)) return;
  loop_.post([self = shared_from_this()] { self->pump(); });
}

void VerbsClient::register_local(const VerbsTransferRef& transfer, size_t rail) {
  const Op& op = *transfer->op;
  auto& local = transfer->local[rail];
  const VerbsCardRef card = rails_[rail].card;
  uint8_t* const begin = op.local + op.local_view.offset();
  const uint64_t length = op.local_view.bytes() == 0 ? 0 : op.local_view.end() - op.local_view.offset();
  local.registration =
      length == 0 ? card->staging->registration() : card->memory.find(reinterpret_cast<uintptr_t>(begin), length);
  local.state = local.registration ? VerbsTransfer::Local::here : VerbsTransfer::Local::asked;
  if (local.registration) return;
  const auto done = [self = shared_from_this(), transfer, rail, card](RegistrationRef made, const Status& status) {
    self->domain_->on_failure(card, status);
    self->loop_.post([self, transfer, rail, made = std::move(made), status] {
      transfer->local[rail] = {made ? VerbsTransfer::Local::here : VerbsTransfer::Local::failed, made, status};
      if (self->closed_) return;
      if (!status.ok()) {
        self->host_.count("verbs_registrations_failed", 1);
        self->open_some(true);  // at another rail it may be possible
      }
      self->attempt(transfer);
    });
  };
  const bool on_device = op.local_device >= 0;
  const bool begun = card->memory_worker.enlist([card, begin, length, on_device, done](bool last) {
    try {
      done(card->memory.get(begin, length, on_device), {});
    } catch (const Error& error) {
      if (!last) return false;
      done(nullptr, error.status());
    }
    return true;
  });
  if (!begun)
    local = {VerbsTransfer::Local::failed, nullptr, fail(MR_REGISTRATION, "there is no thread to register memory")};
}

bool VerbsClient::post_on(Connection& connection, const VerbsTransferRef& transfer) {
  const VerbsKeys& keys = *keys_for(transfer, connection.rail);
  const RegistrationRef& local = transfer->local[connection.rail].registration;
  const QueuePairLimits& limits = connection.pair->limits();
  const uint64_t chunk =
      std::min(domain_->options().raw.verbs_chunk_bytes, domain_->rails()[connection.rail].max_message);
  const auto opcode = transfer->is_write() ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
  connection.pair->expect_events();
  QueuePair::Batch batch(*connection.pair, true);
  uint64_t posted = 0;
  for (uint32_t i = 0; i < kPerDoorbell && posted < chunk && transfer->has_work() && batch.has_room(); ++i) {
    const VerbsRequest request = transfer->take(keys, *local, chunk, limits.max_sge);
    Work work;
    work.owner = transfer;
    work.local = local;
    work.begin = request.begin;
    work.length = request.length;
    work.kind = kPart;
    batch.add(std::move(work), opcode, {request.pieces, request.num_pieces}, request.remote, request.rkey);
    ++transfer->open;
    ++connection.carries[transfer.get()];
    connection.bytes += request.length;
    posted += request.length;
  }
  if (posted == 0) return false;
  transfer->local[connection.rail].taken += posted;
  transfer->begun = true;
  transfer->rails |= 1ull << (connection.rail % 64);
  return true;
}

// ---- Completions ----

void VerbsClient::on_done(QueuePair& pair, std::span<Work> done) {
  bool schedule = false;
  const bool room_awaited = waits_for_room_.load() && waits_for_room_.exchange(false);
  for (Work& work : done) {
    if (work.kind == kSmallWork || work.kind == kAtomicWork) {
      end_small(work, {});
    } else {
      std::lock_guard guard(done_lock_);
      done_.emplace_back(pair.shared_from_this(), std::move(work));
      schedule = schedule || !std::exchange(done_scheduled_, true);
    }
  }
  if (schedule || room_awaited) loop_.run([self = shared_from_this()] { self->parts_done(); });
}

void VerbsClient::parts_done() {
  std::vector<std::pair<QueuePairRef, Work>> done;
  {
    std::lock_guard guard(done_lock_);
    done.swap(done_);
    done_scheduled_ = false;
  }
  for (auto& [pair, work] : done) {
    auto found = by_pair_.find(pair.get());
    const ConnectionRef connection = found == by_pair_.end() ? nullptr : found->second;
    if (work.kind == kProbe) {
      if (connection && connection->state == Connection::probing) up(connection);
      continue;
    }
    const auto transfer = std::static_pointer_cast<VerbsTransfer>(work.owner);
    if (connection) {
      connection->bytes -= work.length;
      if (auto carried = connection->carries.find(transfer.get()); --carried->second == 0)
        connection->carries.erase(carried);
    }
    --transfer->open;
    ++transfer->op->chunks;
    if (!transfer->queued || transfer->failure.ok()) settle(transfer);
  }
  if (closed_) return;
  host_.heard_on_loop();
  pump();
}

void VerbsClient::help(const mr_op& op, Time until) {
  std::vector<QueuePairRef> pairs;
  {
    std::lock_guard guard(poll_lock_);
    pairs = polled_;
  }
  const Time limit = std::min(until, after(domain_->options().raw.verbs_spin));
  while (!op.done() && !pairs.empty() && Clock::now() < limit)
    for (const auto& pair : pairs) pair->drain(false);
}

}  // namespace mr
