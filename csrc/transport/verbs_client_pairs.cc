// The client's rails and queue pairs: how they come, go, and are replaced.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

#include "verbs_client.h"
#include "verbs_devices.h"

namespace mr {
namespace {

constexpr double kProbeTimeout = 2;  // of the first request on a new queue pair, which moves nothing
constexpr double kFirstPause = 0.05, kLongestPause = 5;  // before a rail that failed is tried again
constexpr uint32_t kPatience = 6;     // failures of a rail in a row that an operation waits for which has no other lane
constexpr uint32_t kMaxSetbacks = 4;  // queue pairs that fail under an operation
constexpr double kSoon = 0.001;
constexpr double kPatienceWithKernel = 0.2;  // for a queue pair to be shut, before its memory is taken from the card

// About the way to the peer, not about the request: the rail is no good at the moment.
bool is_rails_fault(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:  // a call failed, or the card told
    case IBV_WC_WR_FLUSH_ERR:
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
    case IBV_WC_FATAL_ERR:
    case IBV_WC_GENERAL_ERR:
      return true;
    default:
      return false;
  }
}

bool is_local_fault(ibv_wc_status status) { return status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_LOC_ACCESS_ERR; }

Status refused(const QueuePairFailure& cause) {
  return fail(MR_ACCESS_DENIED, "the owner's card refused it (" + cause.why.text +
                                    "): the region was dropped, or does "
                                    "not grant it");
}

Status unregistered(const QueuePairFailure& cause) {
  return fail(MR_REGISTRATION, "our card could not reach the local memory (" + cause.why.text +
                                   "): was it unmapped while the operation ran?");
}

Status too_often(uint32_t times, const Status& lastly) {
  return fail(kUnreachable, "verbs: " + std::to_string(times) + " queue pairs failed under it, lastly: " + lastly.text);
}

}  // namespace

// ---- Rails ----

void VerbsClient::ask_rails() {
  if (!std::exchange(asked_rails_, true)) host_.send_on_loop(kVerbsAsk, {});
}

void VerbsClient::on_rails(std::vector<RailFace> theirs) {
  if (have_rails_ || !asked_rails_) return;
  have_rails_ = true;
  const auto& ours = domain_->rails();
  const auto paths = pair_rails(std::vector<RailFace>(ours.begin(), ours.end()), theirs);
  for (size_t i = 0; i < rails_.size(); ++i) {
    rails_[i].reaches = paths[i].has_value();
    if (!paths[i]) continue;
    rails_[i].path = *paths[i];
    rails_[i].their_lid = theirs[paths[i]->theirs].lid;
  }
  reaches_nothing_ = std::none_of(rails_.begin(), rails_.end(), [](const RailState& rail) { return rail.reaches; });
  open_some(!large_.empty());
  pump();
}

// Where verbs can't carry it, it goes another way.
bool VerbsClient::has_other_lanes(const Op& op) const {
  const uint32_t wanted = op.flags & ~uint32_t{MR_STRICT};
  if ((op.flags & MR_STRICT) != 0 || (wanted != 0 && (wanted & MR_LANE_TCP) == 0)) return false;
  return host_.options().allows("tcp") && ("," + host_.info().lanes + ",").find(",tcp,") != std::string::npos;
}

std::string VerbsClient::refuses(const Op& op) const {
  if (reaches_nothing_.load()) return "no rail of ours reaches one of the peer's";
  const View& there = op.remote_view;
  if (there.is_contiguous() || there.run() >= domain_->options().raw.verbs_min_run || !has_other_lanes(op)) return "";
  return "each run of " + std::to_string(there.run()) + " bytes would be a request (option verbs_min_run)";
}

std::string VerbsClient::name_of(size_t rail) const { return domain_->rails()[rail].name(); }

bool VerbsClient::may_use(size_t rail) const {
  const RailState& state = rails_[rail];
  if (!state.reaches) return false;
  if (!state.down) return true;
  // With all ports down the cards may yet bring it through: links flap.
  return std::none_of(rails_.begin(), rails_.end(), [](const RailState& each) { return each.reaches && !each.down; });
}

// What an operation needs: for a small one the first rail that is fit, for a large one all.
void VerbsClient::open_some(bool large) {
  if (!have_rails_ || closed_) return;
  for (const size_t r : order_here()) {
    RailState& rail = rails_[r];
    if (!may_use(r) || Clock::now() < rail.retry_at) continue;
    if (!rail.slots[0]) open(r, 0);
    const bool fit = rail.failures == 0 && rail.slots[0];
    for (uint32_t s = 1; s < rail.slots.size() && large && fit; ++s)
      if (!rail.slots[s] && rail.slots[0]->state == Connection::up && Clock::now() >= rail.more_at) open(r, s);
    if (!large && fit) return;
  }
}

bool VerbsClient::worth_waiting(const VerbsTransfer& transfer) const {
  if (!have_rails_) return true;
  const bool patient = !has_other_lanes(*transfer.op);
  for (size_t r = 0; r < rails_.size(); ++r) {
    const RailState& rail = rails_[r];
    if (!rail.reaches || transfer.local[r].state == VerbsTransfer::Local::failed) continue;
    if (patient && rail.failures < kPatience) return true;
    if (rail.failures == 0 && (!rail.down || rail.slots[0])) return true;
    for (const auto& connection : rail.slots)
      if (connection && connection->state == Connection::up) return true;
  }
  return false;
}

std::string VerbsClient::why_unusable(const VerbsTransfer& transfer) const {
  std::string out;
  for (size_t r = 0; r < rails_.size(); ++r) {
    const RailState& rail = rails_[r];
    const Status& local = transfer.local[r].why;
    const std::string why = !local.ok()      ? local.text
                            : !rail.reaches  ? "reaches no rail of the peer"
                            : !rail.why.ok() ? rail.why.text
                                             : "its port is down";
    out += (out.empty() ? "" : "; ") + name_of(r) + ": " + why;
  }
  return out;
}

// ---- A connection comes ----

void VerbsClient::open(size_t rail, uint32_t slot) {
  const auto connection = std::make_shared<Connection>();
  connection->number = next_number_++;
  connection->rail = rail;
  connection->slot = slot;
  rails_[rail].slots[slot] = connection;
  connections_.emplace(connection->number, connection);
  const auto make = [self = shared_from_this(), connection] {
    self->loop_.post([self, connection, made = self->make_pair(*connection)] { self->opened(connection, made); });
  };
  if (!domain_->workers().run(make, connection->strand))
    lose(connection, fail(MR_RESOURCE_EXHAUSTED, "no thread for queue pairs"), true);
}

// On a worker.
VerbsClient::Made VerbsClient::make_pair(const Connection& connection) {
  const VerbsRail& ours = domain_->rails()[connection.rail];
  const mr_options& raw = domain_->options().raw;
  Made out;
  try {
    out.card = domain_->need_card(connection.rail);
    if (const std::string stale = why_stale(*out.card->context, ours); !stale.empty()) throw Error(MR_CONFIG, stale);
    out.permit = domain_->take_pair();
    QueuePairLimits limits;
    limits.depth = raw.verbs_depth;
    limits.max_sge = kMaxPieces;
    limits.max_inline = raw.verbs_inline_bytes;
    limits.rd_atomic = raw.verbs_rd_atomic;
    limits.responder = 1;
    limits.spin = raw.verbs_spin;
    out.pair = std::make_shared<QueuePair>(out.card->domain, out.card->poller.channel(), out.card->poller.new_id(),
                                           weak_from_this(), limits, verbs_path(domain_->options(), ours), 0);
    out.card->poller.add(out.pair);
  } catch (const Error& error) {
    out.status = error.status();
    domain_->on_failure(out.card, out.status);
  }
  return out;
}

void VerbsClient::opened(const ConnectionRef& connection, Made made) {
  if (!is_open(*connection)) {  // given up meanwhile
    if (made.pair) domain_->workers().run([made] { made.pair->shut(); }, connection->strand);
    return;
  }
  connection->card = made.card;
  if (!made.status.ok()) return refuse(connection, made.status);
  connection->pair = std::move(made.pair);
  connection->permit = std::move(made.permit);
  by_pair_[connection->pair.get()] = connection;
  connection->state = Connection::offered;
  connection->known_there = true;
  const RailPair& path = rails_[connection->rail].path;
  const VerbsRail& ours = domain_->rails()[connection->rail];
  VerbsOffer offer;
  offer.number = connection->number;
  offer.rail = static_cast<uint32_t>(path.theirs);
  offer.gid_index = path.gids.theirs.index;
  offer.server_gid = path.gids.theirs.bytes;
  offer.gid = path.gids.ours.bytes;
  offer.lid = ours.lid;
  offer.global = path.grh;
  offer.mtu = verbs_path(domain_->options(), ours).mtu;
  offer.rd_atomic = connection->pair->limits().rd_atomic;
  offer.end = connection->pair->ours();
  host_.send_on_loop(kVerbsOffer, offer.encode());
  set_timer(connection, domain_->options().raw.connect_timeout, "the peer made no queue pair");
}

void VerbsClient::on_accept(const VerbsAccept& accept) {
  auto found = connections_.find(accept.number);
  if (found == connections_.end() || found->second->state != Connection::offered) return;
  const ConnectionRef connection = found->second;
  cancel_timer(*connection);
  if (!accept.status.ok()) {
    connection->known_there = false;
    return refuse(connection, fail(accept.status.kind, "the peer: " + accept.status.text));
  }
  connection->state = Connection::connecting;
  const RailPair& rail = rails_[connection->rail].path;
  QueuePairPath path = verbs_path(domain_->options(), domain_->rails()[connection->rail]);
  path.mtu = accept.mtu;
  path.gid_index = static_cast<uint8_t>(rail.gids.ours.index);
  path.global = rail.grh;
  std::memcpy(path.gid.raw, rail.gids.theirs.bytes.data(), rail.gids.theirs.bytes.size());
  path.lid = rails_[connection->rail].their_lid;
  const auto connect = [self = shared_from_this(), connection, pair = connection->pair, card = connection->card, path,
                        accept] {
    Status status;
    try {
      pair->connect(path, accept.end, accept.rd_atomic);
    } catch (const Error& error) {
      status = error.status();
      self->domain_->on_failure(card, status);
    }
    self->loop_.post([self, connection, status] { self->connected(connection, status); });
  };
  if (!domain_->workers().run(connect, connection->strand))
    lose(connection, fail(MR_RESOURCE_EXHAUSTED, "no thread for queue pairs"), true);
}

// It could not be made, here or there. A rail without the first is of no use; without more than that it is.
void VerbsClient::refuse(const ConnectionRef& connection, const Status& why) {
  if (connection->slot > 0) rails_[connection->rail].more_at = after(kLongestPause);
  lose(connection, why, connection->slot == 0);
}

void VerbsClient::connected(const ConnectionRef& connection, const Status& status) {
  if (!is_open(*connection)) return;
  if (!status.ok()) return lose(connection, status, true);
  connection->state = Connection::probing;
  set_timer(connection, kProbeTimeout, "nothing comes through to the peer");
  Work work;
  work.kind = kProbe;
  QueuePair::Batch batch(*connection->pair, true);
  if (batch.has_room()) batch.add(std::move(work), IBV_WR_RDMA_WRITE, {}, 0, 0);
}

void VerbsClient::up(const ConnectionRef& connection) {
  RailState& rail = rails_[connection->rail];
  if (!is_up(connection->rail)) rail.card = connection->card;
  if (rail.card != connection->card)  // the others are about to be lost with theirs
    return lose(connection, fail(MR_PEER_LOST, "it is of another card than those that are up"), false);
  cancel_timer(*connection);
  connection->state = Connection::up;
  connection->ever_up = true;
  rail.failures = 0;
  rail.down = false;
  rail.why = {};
  host_.count("verbs_pairs_opened", 1);
  {
    std::lock_guard guard(poll_lock_);
    polled_.push_back(connection->pair);
  }
  clear_routes();  // it may be nearer than what was taken before
  choose_routes();
  if (!large_.empty()) open_some(true);
}

void VerbsClient::set_timer(const ConnectionRef& connection, double seconds, const char* what) {
  connection->has_timer = true;
  connection->timer = loop_.at_on_loop(after(seconds), [weak = weak_from_this(), connection, seconds, what] {
    connection->has_timer = false;
    if (const auto self = weak.lock())
      self->lose(connection, fail(MR_PEER_LOST, what + std::string(" within ") + std::to_string(seconds) + " s"), true);
  });
}

void VerbsClient::cancel_timer(Connection& connection) {
  if (std::exchange(connection.has_timer, false)) loop_.cancel_on_loop(connection.timer);
}

const std::vector<size_t>& VerbsClient::order_here() const {
  const NearRails& near = domain_->near_rails();
  return near.order(near.here());
}

// For each place the nearest rail that is fit.
void VerbsClient::choose_routes() {
  if (closed_ || is_blocked()) return;
  for (size_t place = 0; place < near_.size(); ++place) {
    if (near_[place].route.load() != nullptr) continue;
    bool is_far = false;
    for (const size_t r : domain_->near_rails().order(place)) {
      if (!rails_[r].reaches) continue;
      const auto& slots = rails_[r].slots;
      const auto found = std::find_if(slots.begin(), slots.end(),
                                      [](const auto& each) { return each && each->state == Connection::up; });
      if (!may_use(r) || found == slots.end()) {
        is_far = true;
        continue;
      }
      near_[place].is_far.store(is_far);
      near_[place].route.store(route_by(**found));
      break;
    }
  }
}

VerbsClient::Route* VerbsClient::route_by(const Connection& connection) {
  const auto known =
      std::find_if(routes_.begin(), routes_.end(), [&](const auto& each) { return each->pair == connection.pair; });
  if (known != routes_.end()) return known->get();
  const auto theirs = static_cast<uint32_t>(rails_[connection.rail].path.theirs);
  return routes_.emplace_back(std::make_unique<Route>(Route{connection.pair, connection.card, theirs})).get();
}

void VerbsClient::clear_routes() {
  for (Near& near : near_) near.route.store(nullptr);
}

// Small operations that went a longer way than they need: the rail that is nearest to them is connected meanwhile.
void VerbsClient::open_nearer() {
  for (size_t place = 0; place < near_.size(); ++place) {
    if (!near_[place].used_far.exchange(false)) continue;
    const auto& order = domain_->near_rails().order(place);
    const auto nearest = std::find_if(order.begin(), order.end(), [this](size_t r) { return may_use(r); });
    if (nearest != order.end() && !rails_[*nearest].slots[0] && Clock::now() >= rails_[*nearest].retry_at)
      open(*nearest, 0);
  }
}

// Who comes now finds one in use, so who may hold another is inside.
void VerbsClient::drop_old_routes() {
  if (inside_.load() == 0) {
    std::erase_if(routes_, [this](const auto& route) {
      return std::none_of(near_.begin(), near_.end(),
                          [&](const Near& near) { return near.route.load() == route.get(); });
    });
  } else {
    loop_.at_on_loop(after(kSoon), [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->drop_old_routes();
    });
  }
}

// ---- A connection goes ----

void VerbsClient::on_broken(QueuePair& pair) {
  loop_.run([self = shared_from_this(), ref = pair.shared_from_this()] {
    auto found = self->by_pair_.find(ref.get());
    if (found == self->by_pair_.end()) return;
    const ConnectionRef connection = found->second;
    const QueuePairFailure cause = ref->failure();
    self->lose(connection, cause.why, is_rails_fault(cause.status));
  });
}

void VerbsClient::lose(const ConnectionRef& connection, Status why, bool blame_rail) {
  if (!is_open(*connection)) return;
  const bool was_up = connection->state == Connection::up;
  cancel_timer(*connection);
  connection->state = Connection::closing;
  connection->why = why;
  RailState& rail = rails_[connection->rail];
  if (rail.slots[connection->slot] == connection) rail.slots[connection->slot].reset();
  if (!is_up(connection->rail)) rail.card.reset();
  clear_routes();
  ++closing_;
  if (was_up) {
    host_.count("verbs_pairs_lost", 1);
    std::lock_guard guard(poll_lock_);
    std::erase(polled_, connection->pair);
  }
  shut(connection);
  if (blame_rail) lose_rail(connection->rail, why);
  if (!closed_)
    loop_.post([weak = weak_from_this()] {
      if (const auto self = weak.lock(); self && !self->closed_) self->pump();
    });
}

void VerbsClient::lose_rail(size_t index, const Status& why) {
  RailState& rail = rails_[index];
  rail.why = why;
  const double pause = std::min(kLongestPause, kFirstPause * std::exp2(std::min(rail.failures, 20u)));
  ++rail.failures;
  rail.retry_at = after(pause);
  for (const auto& connection : std::vector<ConnectionRef>(rail.slots))
    if (connection) lose(connection, why, false);
  if (!closed_) try_later(index);
}

// In the background: operations take another rail or lane until it has proved to work again.
void VerbsClient::try_later(size_t rail) {
  loop_.at_on_loop(rails_[rail].retry_at, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self || self->closed_ || (self->small_.empty() && self->large_.empty())) return;
    self->open_some(!self->large_.empty());
    self->pump();
  });
}

// Behind all else that the kernel is asked for this connection. No thread may hold the route while its queue pair is
// shut; none can begin to. What never was up has nothing in the card's hands.
void VerbsClient::shut(const ConnectionRef& connection) {
  const auto work = [self = shared_from_this(), connection, pair = connection->pair, card = connection->card,
                     permit = connection->permit] {
    while (self->inside_.load() != 0) std::this_thread::yield();
    const bool gone = pair->shut();  // on_quiet tells
    card->poller.remove(pair->id());
    if (!gone) return;
    self->loop_.post([connection] {
      for (const auto& [blocks, block] : std::exchange(connection->staged, {})) blocks->give_back(block);
    });
  };
  if (connection->pair && !domain_->workers().run(work, connection->strand)) work();
  if (connection->ever_up)
    loop_.at_on_loop(after(kPatienceWithKernel), [self = shared_from_this(), connection] { self->wrest(connection); });
  else
    loop_.post([self = shared_from_this(), connection] { self->bury(connection, true); });
}

void VerbsClient::on_quiet(QueuePair& pair) {
  loop_.run([self = shared_from_this(), ref = pair.shared_from_this()] {
    const auto found = self->by_pair_.find(ref.get());
    if (found != self->by_pair_.end()) self->bury(ConnectionRef(found->second), true);
  });
}

// The kernel sits on the queue pair, and the card may still be at its requests. If it can't be taken from the memory,
// the memory can be taken from it: that is another call, on other things. Others that use the same registration will
// register anew.
void VerbsClient::wrest(const ConnectionRef& connection) {
  if (connection->state != Connection::closing) return;
  const VerbsCardRef card = connection->card;
  const auto in_use = connection->pair->local_in_use();
  for (const auto& registration : in_use) card->memory.remove(registration);
  domain_->workers().run([self = shared_from_this(), connection, in_use] {
    bool taken = true;
    for (const auto& registration : in_use) taken &= registration->revoke();
    if (taken) self->loop_.post([self, connection] { self->bury(connection, false); });
  });
}

// The card touches no memory of an operation for it any more; where it is not quiet it may write to staging blocks yet.
// What it leaves behind goes elsewhere or ends, and nothing of ours is written over there before the peer has destroyed
// its end too.
void VerbsClient::bury(const ConnectionRef& connection, bool quiet) {
  if (connection->state != Connection::closing) return;
  std::vector<Work> left;
  QueuePairFailure cause;
  uint64_t first = 0;
  if (connection->pair) {
    by_pair_.erase(connection->pair.get());
    left = connection->pair->take_unfinished(&first);
    cause = connection->pair->failure();
  }
  --closing_;
  std::vector<VerbsTransferRef> touched;
  for (size_t i = 0; i < left.size(); ++i) {
    const bool failed =
        cause.status != IBV_WC_SUCCESS && cause.status != IBV_WC_WR_FLUSH_ERR && first + i == cause.sequence;
    if (left[i].kind == kPart) touched.push_back(std::static_pointer_cast<VerbsTransfer>(left[i].owner));
    if (!quiet && left[i].staged != nullptr)
      connection->staged.emplace_back(left[i].staging, std::exchange(left[i].staged, nullptr));
    resolve(*connection, left[i], failed ? &cause : nullptr);
  }
  ghosts_ += connection->ghosts;
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  for (const auto& transfer : touched) {
    const bool ours = connection->why.kind == MR_CANCELLED;  // we shut it: that is no reason to give up
    if (!ours && !transfer->ended && transfer->failure.ok() && ++transfer->setbacks > kMaxSetbacks)
      transfer->failure = too_often(transfer->setbacks, connection->why);
    // Another lane must wait for the fence as well.
    if (transfer->open == 0 && transfer->failure.kind > 0) end(transfer, transfer->failure);
    if (transfer->has_work() || transfer->failure.kind < 0) enqueue(transfer);
  }
  left.clear();
  connection->pair.reset();
  connection->card.reset();
  connection->permit.reset();
  if (closed_ || !connection->known_there) {
    connections_.erase(connection->number);
    connection->state = Connection::gone;
  } else {
    connection->state = Connection::fencing;
    host_.send_on_loop(kVerbsFence, Writer().put(connection->number).take());
  }
  if (closed_) return;
  choose_routes();
  drop_old_routes();
  if (!small_.empty() || !large_.empty()) open_some(!large_.empty());
  pump();
}

void VerbsClient::on_fenced(uint64_t number) {
  auto found = connections_.find(number);
  if (found == connections_.end() || found->second->state != Connection::fencing) return;
  ghosts_ -= found->second->ghosts;
  connections_.erase(found);
  choose_routes();
  pump();
}

// A request whose end is not known; `cause`: it is the one that failed.
void VerbsClient::resolve(Connection& connection, Work& work, const QueuePairFailure* cause) {
  if (work.kind == kProbe) return;
  if (work.kind != kPart) return resolve_small(connection, work, cause);
  auto& transfer = *static_cast<VerbsTransfer*>(work.owner.get());
  --transfer.open;
  const bool was_refused = cause != nullptr && cause->status == IBV_WC_REM_ACCESS_ERR;
  if (transfer.is_write() && !was_refused) ++connection.ghosts;
  if (closed_) {
    transfer.failure = closed_why_;
  } else if (was_refused) {
    on_gone(transfer.op->remote->name.id);  // the owner will say more when it is asked for keys again
    if (++transfer.access_errors > 1 && transfer.failure.ok()) transfer.failure = refused(*cause);
    transfer.give_back(work.begin, work.length);
  } else if (cause != nullptr && is_local_fault(cause->status) && !work.local->is_revoked()) {
    if (transfer.failure.ok()) transfer.failure = unregistered(*cause);
  } else {
    transfer.give_back(work.begin, work.length);
  }
}

void VerbsClient::resolve_small(Connection& connection, Work& work, const QueuePairFailure* cause) {
  Op& op = *work.op;
  const bool was_refused = cause != nullptr && cause->status == IBV_WC_REM_ACCESS_ERR;
  const bool changes = op.verb != Verb::read && !was_refused;
  if (op.verb != Verb::read) op.remote_state = was_refused ? MR_NOT_WRITTEN : MR_UNKNOWN;
  if (changes) ++connection.ghosts;
  if (was_refused) on_gone(op.remote->name.id);
  if (closed_) return end_small(work, Status(closed_why_));
  if (op.stopping()) return end_small(work, stopped(op.stop_kind));
  if (op.deadline <= Clock::now()) return end_small(work, stopped(MR_TRANSFER_TIMEOUT));
  const bool revoked = work.local && work.local->is_revoked();
  if (cause != nullptr && is_local_fault(cause->status) && !revoked) return end_small(work, unregistered(*cause));
  if (is_atomic(op.verb)) return end_small(work, was_refused ? refused(*cause) : connection.why);
  // It begins anew as one that is watched over. Where it is refused again the owner says why.
  ++op.retries;
  if (!op.admitted) return end_small(work, fail(kUnreachable, "verbs: " + connection.why.text));
  if (work.staged != nullptr) work.staging->give_back(std::exchange(work.staged, nullptr));
  const VerbsTransferRef again = begin(work.op);
  if (op.retries > kMaxSetbacks) again->failure = too_often(op.retries, connection.why);
  enqueue(again);
}

// ---- What cards tell ----

void VerbsClient::on_port(size_t rail, bool up) {
  loop_.run([weak = weak_from_this(), rail, up] {
    const auto self = weak.lock();
    if (!self || self->closed_) return;
    RailState& state = self->rails_[rail];
    state.down = !up;
    if (up) state.retry_at = {};
    self->clear_routes();
    self->choose_routes();
    if (up && state.failures > 0 && !state.slots[0]) self->open(rail, 0);
    self->pump();
  });
}

void VerbsClient::on_card_lost(const VerbsCardRef& card) {
  loop_.run([weak = weak_from_this(), card] {
    const auto self = weak.lock();
    if (!self || self->closed_) return;
    for (size_t r = 0; r < self->rails_.size(); ++r) {
      if (self->domain_->rails()[r].device != card->name()) continue;
      self->lose_rail(r, fail(MR_PEER_LOST, "the card " + card->name() + " has failed"));
      for (const auto* queue : {&self->small_, &self->large_})
        for (const auto& transfer : *queue) transfer->local[r] = {};
    }
    self->drop_old_routes();
  });
}

void VerbsClient::on_pair_event(uint32_t queue_pair, const char* what) {
  loop_.run([weak = weak_from_this(), queue_pair, what] {
    const auto self = weak.lock();
    if (!self) return;
    for (const auto& [pair, connection] : self->by_pair_)
      if (pair->number() == queue_pair) {
        const ConnectionRef found = connection;
        found->pair->give_up(fail(MR_PEER_LOST, what));
        return;
      }
  });
}

void VerbsClient::close(const Status& why) {
  if (std::exchange(closed_, true)) return;
  closed_why_ = why;
  clear_routes();
  std::vector<ConnectionRef> open;
  for (const auto& [number, connection] : connections_) open.push_back(connection);
  for (const auto& connection : open) lose(connection, why, false);
  for (auto* queue : {&small_, &large_})
    for (const auto& transfer : std::exchange(*queue, {})) {
      transfer->queued = false;
      if (transfer->failure.ok()) transfer->failure = why;
      settle(transfer);
    }
}

void VerbsClient::abandon() {
  std::vector<ConnectionRef> held;
  for (const auto& [number, connection] : connections_) held.push_back(connection);
  for (const auto& connection : held) bury(connection, false);
}

}  // namespace mr
