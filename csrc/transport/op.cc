#include "op.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "stream_order.h"

namespace mr {
namespace {

constexpr uint64_t kWorthALook = 64 << 10;  // bytes; larger ones take longer than a look

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

bool mr_op::finish(Status&& status) {
  std::unique_lock guard(lock_);
  if (done()) return false;
  if (!status.ok()) {
    if (status.text.find(verb_name(verb)) != 0) status.text = describe() + ": " + status.text;
    status_ = std::move(status);
  }
  finished_ = Clock::now();
  // Links may hold much (mappings, buffers); a done operation keeps none of it.
  lane_state.reset();
  const auto helped = std::move(helper_);
  const auto queue = std::move(completions_);
  const auto opened = std::move(gate);
  const auto tell = std::move(on_end);
  const uint32_t before = state_.exchange(kDone);
  guard.unlock();
  if ((before & kLed) != 0) loop->nudge();
  if ((before & kWaited) != 0) ::syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
  if (opened) opened->open();
  if (queue != nullptr) queue->push(tag_);
  if (tell) tell(status_);
  return true;
}

void mr_op::rearm(Time now, Time until) {
  std::lock_guard guard(lock_);  // whoever finished it has left
  submitted = now;
  deadline = until;
  admitted = unreachable = false;
  link.reset();
  tried_lanes = 0;
  lane = "";
  for (auto* counted : {&chunks, &rails, &retries}) counted->store(0, std::memory_order_relaxed);
  skipped.clear();
  remote_state = MR_NOT_WRITTEN;
  stop_kind.store(0, std::memory_order_relaxed);
  if (!status_.ok()) status_ = {};
  state_.store(0);
}

void mr_op::set_helper(std::shared_ptr<OpHelper> helper) {
  {
    std::lock_guard guard(lock_);
    if (done()) return;
    helper_ = std::move(helper);
  }
  if ((state_.load() & kLed) != 0) loop->nudge();
}

std::shared_ptr<OpHelper> mr_op::helper() {
  std::lock_guard guard(lock_);
  return helper_;
}

void mr_op::wind_up() {
  if (const auto work = helper()) work->help(*this, Time::min());
}

bool mr_op::wait(double timeout) {
  if (done()) return true;
  if (timeout == 0) return false;
  const bool endless = timeout < 0 || timeout > 1e9;
  const Time until = endless ? Time::max() : after(timeout);
  for (bool first = true; !done() && (first || Clock::now() < until); first = false) {
    if (const auto work = helper()) {
      work->help(*this, until);
      if (!done() && helper() == work) sleep_until(until);  // else it has passed on to another
      continue;
    }
    const auto go_back = [](const void* op) {
      auto* self = static_cast<mr_op*>(const_cast<void*>(op));
      return self->done() || self->helper() != nullptr;
    };
    if (loop != nullptr) state_.fetch_or(kLed);
    const auto how = bytes() <= kWorthALook ? Loop::Wait::eager : Loop::Wait::patient;
    if (loop == nullptr || loop->lead(until, go_back, this, how) == Loop::Lead::refused) sleep_until(until);
  }
  return done();
}

void mr_op::sleep_until(Time until) {
  const uint32_t seen = state_.fetch_or(kWaited) | kWaited;
  if ((seen & kDone) != 0) return;
  timespec left{}, *limit = nullptr;
  if (until != Time::max()) {
    const auto ns = std::max<int64_t>(0, std::chrono::nanoseconds(until - Clock::now()).count());
    left = {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    limit = &left;
  }
  ::syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, seen, limit, nullptr, 0);
}

bool mr_op::attach(std::shared_ptr<mr_completions> queue, uint64_t tag) {
  {
    std::lock_guard guard(lock_);
    if (completions_ != nullptr) return false;
    if (!done()) {
      completions_ = std::move(queue);
      tag_ = tag;
      return true;
    }
  }
  queue->push(tag);
  return true;
}
