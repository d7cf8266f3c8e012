#include "inbox.h"

#include <algorithm>

#include "peer.h"

namespace mr {
namespace {

constexpr uint64_t kBatchCount = 256, kBatchBytes = 1 << 20;  // a single message may be larger

void append(Bytes& out, const void* data, size_t length) {
  const auto* const bytes = static_cast<const uint8_t*>(data);
  out.insert(out.end(), bytes, bytes + length);
}

}  // namespace

void Intake::arrived(uint64_t bytes) {
  if (unread_.fetch_add(bytes) + bytes > window_) throw Error(MR_PROTOCOL, "messages past the window that was granted");
}

void Intake::read(uint64_t bytes) {
  unread_.fetch_sub(bytes);
  const uint64_t before = credit_.fetch_add(bytes), mark = window_ / 4;
  if (before >= mark || before + bytes < mark) return;
  if (const auto peer = peer_.lock()) peer->give_credit(shared_from_this());
}

void Batch::settle() const {
  for (const auto& [intake, bytes] : from) intake->read(bytes);
}

// A thread inside of take.
struct Inbox::Waiter {
  Waiter(Inbox& inbox, Stop* stop, bool background) : inbox(inbox), stop(stop), background(background) {
    if (stop == nullptr) return;
    std::lock_guard guard(stop->lock_);
    stop->waiters_.push_back(this);
  }
  ~Waiter() {
    if (stop == nullptr) return;
    std::lock_guard guard(stop->lock_);
    std::erase(stop->waiters_, this);
  }

  bool stopped() const { return stop != nullptr && stop->is_set(); }

  Inbox& inbox;
  Stop* const stop;
  const bool background;
  // Under the inbox's lock.
  bool leads = false;   // waits for events itself, or is about to
  bool called = false;  // was woken for a message
  std::condition_variable wake;
};

void Inbox::Stop::set() {
  set_ = true;
  if (!is_ours()) return;  // who waited stayed behind in the parent
  std::lock_guard guard(lock_);
  for (Waiter* const waiter : waiters_) waiter->inbox.look_again(*waiter);
}

void Inbox::look_again(Waiter& waiter) {
  std::lock_guard guard(lock_);
  if (waiter.leads)
    loop_->nudge();
  else
    waiter.wake.notify_one();
}

Batch& Inbox::batch_for(uint64_t bytes) {
  if (batches_.empty() || batches_.back()->count == kBatchCount || batches_.back()->bytes.size() + bytes > kBatchBytes)
    batches_.push_back(spare_ ? std::move(spare_) : std::make_unique<Batch>());
  return *batches_.back();
}

void Inbox::put_locked(int kind, std::string_view sender, ByteView head, ByteView body) {
  Batch& batch = batch_for(head.size() + body.size());
  const mr_incoming entry{kind, static_cast<uint32_t>(sender.size()), head.size() + body.size()};
  append(batch.bytes, &entry, sizeof entry);
  append(batch.bytes, sender.data(), sender.size());
  append(batch.bytes, head.data(), head.size());
  append(batch.bytes, body.data(), body.size());
  ++batch.count;
  refresh_locked();
}

void Inbox::add_on_loop(const std::shared_ptr<Intake>& from, std::string_view sender, ByteView head, ByteView body) {
  std::lock_guard guard(lock_);
  put_locked(MR_OK, sender, head, body);
  const uint64_t bytes = message_cost(head.size() + body.size());
  auto& due = batches_.back()->from;
  if (due.empty() || due.back().first != from)
    due.emplace_back(from, bytes);
  else
    due.back().second += bytes;
  hand_over_locked();
}

void Inbox::add_notice_on_loop(std::string_view sender, const Status& why) {
  const ByteView text{reinterpret_cast<const uint8_t*>(why.text.data()), why.text.size()};
  std::lock_guard guard(lock_);
  put_locked(why.kind, sender, text, {});
  hand_over_locked();
}

// For messages that nobody is about to take. Of those that wait, one that leads the loop sees them by itself.
void Inbox::hand_over_locked() {
  if (!ready_.load()) return;
  Waiter* chosen = nullptr;
  for (Waiter* const waiter : waiters_) {
    if (waiter->leads) return loop_->nudge();
    if (waiter->called) return;
    if (chosen == nullptr || chosen->background || !waiter->background) chosen = waiter;  // the last to come
  }
  if (chosen == nullptr) return;
  chosen->called = true;
  chosen->wake.notify_one();
}

const Batch* Inbox::next_locked() {
  owner_ = std::this_thread::get_id();
  current_ = std::move(batches_.front());
  batches_.pop_front();
  refresh_locked();
  return current_.get();
}

std::unique_ptr<Batch> Inbox::give_up_turn_locked() {
  if (owner_ != std::this_thread::get_id()) return nullptr;
  owner_ = {};
  refresh_locked();
  return std::move(current_);
}

const Batch* Inbox::take(double timeout, Stop* stop, bool background) {
  const Time until = timeout < 0 || timeout > 1e9 ? Time::max() : timeout == 0 ? Time::min() : after(timeout);
  Waiter me(*this, stop, background);
  std::unique_lock guard(lock_);
  const Batch* taken = nullptr;
  if (auto read = give_up_turn_locked()) {
    if (ready_.load() && !me.stopped()) taken = next_locked();
    guard.unlock();
    read->settle();
    read->from.clear();
    read->bytes.clear();
    read->count = 0;
    guard.lock();
    if (read->bytes.capacity() <= kBatchBytes) spare_ = std::move(read);
    if (taken != nullptr) return taken;
  }
  while (!closed_.load() && !me.stopped()) {
    if (ready_.load()) return next_locked();
    if (until != Time::max() && Clock::now() >= until) break;
    wait_locked(guard, me, until);
  }
  hand_over_locked();
  return nullptr;
}

// One in the background leaves the loop to one that is not; if that one found it taken, it tries again.
bool Inbox::leaves_lead_locked(const Waiter& me) {
  if (!me.background) return false;
  for (Waiter* const waiter : waiters_) {
    if (waiter->background) continue;
    if (!waiter->leads && !std::exchange(waiter->called, true)) waiter->wake.notify_one();
    return true;
  }
  return false;
}

// Leads the loop if nobody does, else sleeps. Returns when there may be something to take, or for no reason.
void Inbox::wait_locked(std::unique_lock<std::mutex>& guard, Waiter& me, Time until) {
  const auto is_over = [](const void* waiter) {
    const auto& self = *static_cast<const Waiter*>(waiter);
    return self.inbox.ready_.load() || self.stopped() || self.inbox.closed_.load();
  };
  waiters_.push_back(&me);
  me.called = false;
  auto led = Loop::Lead::refused;
  if (owner_ == std::thread::id{} && !leaves_lead_locked(me)) {
    me.leads = true;
    guard.unlock();
    led = loop_->lead(until, is_over, &me, me.background ? Loop::Wait::background : Loop::Wait::eager);
    guard.lock();
    me.leads = false;
  }
  while (led != Loop::Lead::ended && !is_over(&me) && !me.called) {
    if (until == Time::max())
      me.wake.wait(guard);
    else if (me.wake.wait_until(guard, until) == std::cv_status::timeout)
      break;
  }
  std::erase(waiters_, &me);
}

void Inbox::done(bool put_back) {
  std::unique_lock guard(lock_);
  auto read = give_up_turn_locked();
  if (read == nullptr) return;
  if (put_back) {
    batches_.push_front(std::move(read));
    refresh_locked();
  }
  hand_over_locked();
  guard.unlock();
  if (read != nullptr) read->settle();
}

std::deque<std::unique_ptr<Batch>> Inbox::empty() {
  std::lock_guard guard(lock_);
  auto all = std::exchange(batches_, {});
  refresh_locked();
  return all;
}

void Inbox::close() {
  std::lock_guard guard(lock_);
  closed_ = true;
  for (Waiter* const waiter : waiters_) waiter->wake.notify_one();
  loop_->nudge();
}

}  // namespace mr
