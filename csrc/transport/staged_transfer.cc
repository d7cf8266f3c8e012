#include <array>
#include <string_view>

#include "../memory/strided_copy.h"
#include "staged.h"

namespace mr {
namespace {

constexpr size_t kOpen = 4;  // parts on their way at a time

// What explain() calls it: by the lane that the parts took.
const char* name_over(std::string_view lane) {
  static constexpr std::array<std::pair<const char*, const char*>, 4> kNames{
      {{"shm", "staged-shm"}, {"verbs", "staged-verbs"}, {"tcp", "staged-tcp"}, {"local", "staged-local"}}};
  for (const auto& [prefix, name] : kNames)
    if (lane.starts_with(prefix)) return name;
  return "staged";
}

}  // namespace

struct StagedTransfer::Part {
  View there;
  uint64_t begin = 0;          // of the operation's bytes
  int mine = -1, theirs = -1;  // slots
  OpRef moving;                // between two host memories
  uint64_t length() const { return there.bytes(); }
};

StagedTransfer::StagedTransfer(std::shared_ptr<StagedClient> client, OpRef op)
    : client_(std::move(client)),
      op_(std::move(op)),
      peer_(op_->peer.lock()),
      reads_(op_->verb == Verb::read),
      needs_mine_(op_->local_device >= 0 || !op_->local_view.is_contiguous()),
      needs_theirs_(op_->remote->on_device),
      parts_(op_->remote_view, Slots::kBytes) {}

void StagedTransfer::begin() {
  if (!needs_theirs_ || client_->their_slots() != nullptr) return go_on();
  client_->ask_for_slots(op_, [self = shared_from_this()](Status status) {
    if (self->status_.ok()) self->status_ = std::move(status);
    self->go_on();
  });
}

void StagedTransfer::stop() {
  for (const PartRef& part : std::set(open_))
    if (part->moving) client_->host.stop_part(part->moving, op_->stop_kind);
  go_on();
}

void StagedTransfer::go_on() {
  if (ended_ || going_on_) return;
  going_on_ = true;
  if (status_.ok() && op_->stopping()) status_ = fail(op_->stop_kind, "it was stopped");
  if (status_.ok() && client_->closing().is_set()) status_ = client_->closing().why();
  const bool may_begin = !needs_theirs_ || client_->their_slots() != nullptr;
  while (status_.ok() && may_begin && !parts_.done() && open_.size() < kOpen) {
    auto part = std::make_shared<Part>();
    if (!take_slots(*part)) break;
    part->begin = parts_.position();
    part->there = parts_.next();
    ++num_parts_;
    open_.insert(part);
    begin_part(part);
  }
  going_on_ = false;
  if (touching_ == 0 && (!status_.ok() || (may_begin && parts_.done() && open_.empty()))) end();
}

// Both or none.
bool StagedTransfer::take_slots(Part& part) {
  const auto retry = [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->go_on();
  };
  if (needs_theirs_ && (part.theirs = client_->their_free().take()) < 0)
    return client_->their_free().wait(retry), false;
  if (!needs_mine_ || (part.mine = client_->domain->slots().take()) >= 0) return true;
  client_->domain->slots().wait(retry);
  give_back(part);
  return false;
}

void StagedTransfer::give_back(Part& part) {
  if (const int slot = std::exchange(part.mine, -1); slot >= 0) client_->domain->slots().give_back(slot);
  if (const int slot = std::exchange(part.theirs, -1); slot >= 0) client_->their_free().give_back(slot);
}

// ---- The steps ----

void StagedTransfer::begin_part(const PartRef& part) { reads_ ? pack(part) : gather_here(part); }

void StagedTransfer::pack(const PartRef& part) {
  if (!needs_theirs_) return move(part);
  client_->ask_for_copy(op_, true, part->theirs, part->there, [self = shared_from_this(), part](Status status) {
    self->step_ended(part, std::move(status), &StagedTransfer::move, false);
  });
}

void StagedTransfer::gather_here(const PartRef& part) {
  needs_mine_ ? copy_here(part, &StagedTransfer::move) : move(part);
}

void StagedTransfer::move(const PartRef& part) {
  auto moving = std::make_shared<Op>();
  moving->verb = op_->verb;
  moving->remote = needs_theirs_ ? client_->their_region() : op_->remote;
  const uint64_t length = part->length();
  moving->remote_view =
      needs_theirs_ ? View::contiguous(static_cast<uint64_t>(part->theirs) * Slots::kBytes, length) : part->there;
  moving->local_view = View::contiguous(0, length);
  moving->flags = op_->flags & (MR_LANE_SHM | MR_LANE_TCP | MR_LANE_VERBS);
  moving->submitted = Clock::now();
  moving->deadline = op_->deadline;
  moving->on_end = [self = shared_from_this(), part](const Status&) {
    self->client_->domain->thread().run([self, part] { self->moved(part); });
  };
  ++touching_;
  changed_ = changed_ || !needs_theirs_;
  part->moving = moving;
  try {
    moving->local = part->mine >= 0 ? client_->domain->slot_address(part->mine)
                                    : op_->local + op_->local_view.offset() + part->begin;
    client_->host.submit_part(moving);
  } catch (const Error& error) {
    moving->on_end = nullptr;
    step_ended(part, error.status(), nullptr, true);
  }
}

void StagedTransfer::moved(const PartRef& part) {
  const OpRef moving = std::exchange(part->moving, nullptr);
  lane_ = name_over(moving->lane);
  retries_ += moving->retries.load();
  Status status = moving->status();
  if (!status.ok()) status.text = std::string(lane_) + ": " + status.text;
  step_ended(part, std::move(status), reads_ ? &StagedTransfer::scatter_here : &StagedTransfer::unpack, true);
}

void StagedTransfer::scatter_here(const PartRef& part) {
  needs_mine_ ? copy_here(part, &StagedTransfer::part_done) : part_done(part);
}

void StagedTransfer::unpack(const PartRef& part) {
  if (!needs_theirs_) return part_done(part);
  changed_ = true;
  client_->ask_for_copy(op_, false, part->theirs, part->there, [self = shared_from_this(), part](Status status) {
    self->step_ended(part, std::move(status), &StagedTransfer::part_done, false);
  });
}

void StagedTransfer::part_done(const PartRef& part) {
  open_.erase(part);
  give_back(*part);
  go_on();
}

// Between our slot and local memory, which may be of the host or of a device.
void StagedTransfer::copy_here(const PartRef& part, Next next) {
  ++touching_;
  Status status;
  uint8_t* slot = nullptr;
  try {
    slot = client_->domain->slot_address(part->mine);
  } catch (const Error& error) {
    return step_ended(part, error.status(), nullptr, true);
  }
  const uint64_t length = part->length();
  if (op_->local_device < 0) {
    if (reads_)
      scatter(op_->local, op_->local_view, slot, part->begin, length, false);
    else
      gather(slot, op_->local, op_->local_view, part->begin, length, false);
    return step_ended(part, {}, next, true);
  }
  const View whole = View::contiguous(0, length);
  DeviceDomain::Side mine{slot, Cursor(whole)}, local{op_->local, Cursor(op_->local_view, part->begin)};
  client_->domain->copy(
      op_->local_device, reads_ ? local : mine, reads_ ? mine : local, length,
      [self = shared_from_this(), part, next](Status done) { self->step_ended(part, std::move(done), next, true); });
}

// The next step, unless this one or the whole operation has failed. A part whose owner answers after the end of the
// operation gives back its slots here.
void StagedTransfer::step_ended(const PartRef& part, Status status, Next next, bool touches_local) {
  if (touches_local) --touching_;
  if (!status.ok() && status_.ok()) status_ = std::move(status);
  if (status_.ok() && op_->stopping()) status_ = fail(op_->stop_kind, "it was stopped");
  if (status_.ok() && !ended_) return (this->*next)(part);
  part_done(part);
}

void StagedTransfer::end() {
  ended_ = true;
  op_->lane = lane_;
  op_->chunks.store(num_parts_, std::memory_order_relaxed);
  op_->rails.store(1, std::memory_order_relaxed);
  op_->retries.store(retries_, std::memory_order_relaxed);
  if (!reads_) op_->remote_state = status_.ok() ? MR_WRITTEN : changed_ ? MR_UNKNOWN : MR_NOT_WRITTEN;
  if (status_.ok()) client_->host.count(reads_ ? "staged_read_bytes" : "staged_write_bytes", op_->bytes());
  const auto self = shared_from_this();
  client_->host.on_done(op_, std::move(status_));
  client_->ended(self);
}

}  // namespace mr
