#include "op.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace mr {
namespace {

// How long a waiter handles events itself before it sleeps: about what a sleep and a wake-up cost.
constexpr auto kSpin = std::chrono::microseconds(50);

}  // namespace

const char* verb_name(Verb verb) {
  switch (verb) {
    case Verb::read:
      return "read";
    case Verb::write:
      return "write";
    case Verb::fetch_add:
      return "fetch_add";
    case Verb::compare_and_swap:
      return "compare_and_swap";
    case Verb::drop:
      return "drop";
    case Verb::map:
      return "map";
    case Verb::connect:
      return "connect";
    case Verb::watch:
      return "watch";
    case Verb::lookup:
      return "lookup";
  }
  return "?";
}

}  // namespace mr

using namespace mr;

void mr_completions::push(uint64_t tag) {
  bool was_empty;
  {
    std::lock_guard guard(lock);
    was_empty = tags.empty();
    tags.push_back(tag);
  }
  const uint64_t one = 1;
  if (was_empty) (void)!::write(event.get(), &one, sizeof one);
}

uint64_t mr_completions::take(uint64_t* out, uint64_t capacity) {
  std::lock_guard guard(lock);
  const uint64_t count = std::min<uint64_t>(capacity, tags.size());
  std::copy_n(tags.begin(), count, out);
  tags.erase(tags.begin(), tags.begin() + static_cast<std::ptrdiff_t>(count));
  uint64_t value;
  if (tags.empty()) (void)!::read(event.get(), &value, sizeof value);
  return count;
}

std::string mr_op::describe() const {
  std::string out = verb_name(verb);
  const bool moves = verb == Verb::read || verb == Verb::write;
  if (moves) out += " of " + std::to_string(bytes()) + " bytes";
  if (verb == Verb::lookup) out += " of \"" + name + "\"";
  out += verb == Verb::write ? " to " : verb == Verb::read || verb == Verb::lookup ? " from " : moves ? "" : " at ";
  out += remote ? remote->owner : peer_name;
  if (remote) out += " (region " + std::to_string(remote->name.id) + ")";
  return out;
}

bool mr_op::finish(Status status) {
  std::unique_lock guard(lock_);
  if (state_.load(std::memory_order_relaxed) == kDone) return false;
  if (!status.ok() && status.text.find(verb_name(verb)) != 0) status.text = describe() + ": " + status.text;
  status_ = std::move(status);
  finished_ = Clock::now();
  // Links may hold much (mappings, buffers); a done operation keeps none of it.
  lane_state.reset();
  const auto helped = std::move(helper_);
  const auto queue = std::move(completions_);
  const bool waited = state_.exchange(kDone, std::memory_order_acq_rel) == kWaited;
  guard.unlock();
  if (waited) ::syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
  if (queue != nullptr) queue->push(tag_);
  return true;
}

void mr_op::set_helper(std::shared_ptr<OpHelper> helper) {
  std::lock_guard guard(lock_);
  if (state_.load(std::memory_order_relaxed) != kDone) helper_ = std::move(helper);
}

std::shared_ptr<OpHelper> mr_op::helper() {
  std::lock_guard guard(lock_);
  return helper_;
}

bool mr_op::wait(double timeout) {
  if (done()) return true;
  if (timeout == 0) return false;
  const Time start = Clock::now();
  const bool endless = timeout < 0 || timeout > 1e9;
  const Time until = endless
                         ? Time::max()
                         : start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
  for (Time now = start; now < start + kSpin && now < until; now = Clock::now()) {
    if (const auto work = helper()) work->help(until);
    if (loop != nullptr) loop->progress();
    if (done()) return true;
  }
  while (!done()) {
    uint32_t expected = kPending;
    state_.compare_exchange_strong(expected, kWaited);
    timespec left{}, *limit = nullptr;
    if (!endless) {
      const auto ns = std::chrono::nanoseconds(until - Clock::now()).count();
      if (ns <= 0) return done();
      left = {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
      limit = &left;
    }
    ::syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, kWaited, limit, nullptr, 0);
  }
  return true;
}

bool mr_op::attach(std::shared_ptr<mr_completions> queue, uint64_t tag) {
  {
    std::lock_guard guard(lock_);
    if (completions_ != nullptr) return false;
    if (state_.load(std::memory_order_relaxed) != kDone) {
      completions_ = std::move(queue);
      tag_ = tag;
      return true;
    }
  }
  queue->push(tag);
  return true;
}
