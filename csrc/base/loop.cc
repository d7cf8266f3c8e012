#include "loop.h"

#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cassert>
#include <cstdio>

#include "error.h"
#include "thread.h"

namespace mr {
namespace {

constexpr uint64_t kWakeToken = 0, kTimerToken = 1;
constexpr int kBatch = 64;
constexpr double kLook = 100e-6;  // seconds: a read of 64 KiB over loopback takes 30 to 60 us if nobody sleeps here

// The owners of watches and tasks handle their failures; what still gets here must not end the user's process.
template <typename Work>
void guarded(const std::string& loop, Work&& work) {
  try {
    work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "monarch_rdma: %s: unhandled failure: %s\n", loop.c_str(), error.what());
  }
}

// See rearm_on_loop. The end of a stream is asked for with its bytes, so that it can be told from them.
uint32_t to_kernel(uint32_t events) { return events | EPOLLET | ((events & EPOLLIN) != 0 ? EPOLLRDHUP : 0u); }

int milliseconds(Time now, Time until) {
  if (until == Time::max()) return -1;
  return static_cast<int>(
      std::min<int64_t>(std::chrono::ceil<std::chrono::milliseconds>(until - now).count(), INT32_MAX));
}

void consume(int fd) {
  uint64_t value;
  // EAGAIN means that another thread was faster, which is as good.
  (void)!::read(fd, &value, sizeof value);
}

}  // namespace

Loop::Loop(std::string thread_name, const Task& first, double spin)
    : name_(std::move(thread_name)), pid_(this_pid()), spin_(spin) {
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) throw Error(MR_RESOURCE_EXHAUSTED, "can't make an epoll descriptor (raise `ulimit -n`)", errno);
  wake_ = make_eventfd();
  timer_ = Fd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!timer_.valid()) throw Error(MR_RESOURCE_EXHAUSTED, "can't make a timer descriptor (raise `ulimit -n`)", errno);
  for (auto [fd, token] : {std::pair{wake_.get(), kWakeToken}, std::pair{timer_.get(), kTimerToken}}) {
    epoll_event event{EPOLLIN | EPOLLET, {.u64 = token}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      throw Error(MR_RESOURCE_EXHAUSTED, "can't watch the loop's own descriptors", errno);
  }
  thread_ = std::make_unique<std::thread>(start_without_signals(name_, [this, &first] { thread_main(&first); }));
  began_.wait(false);
}

Loop::~Loop() { stop(); }

void Loop::stop() {
  if (!thread_) return;
  if (!is_this_process(pid_)) {
    // The thread stayed behind in the parent: to join it would wait for ever, to destroy its handle ends the process.
    (void)thread_.release();
    return;
  }
  stopping_.store(true);
  wake();
  thread_->join();
  thread_.reset();
  while (led_.load() != kNobody) {  // it sees stopping_
    wake();
    std::this_thread::yield();
  }
  std::map<TimerId, Task> timers;  // destroyed off the loop: what they own may come back to it
  Hold hold(*this, std::unique_lock(lock_));
  do drain_on_loop();
  while (!close_if_empty());
  stopped_ = true;
  timers.swap(timers_);
  // Waiters may still hold a reference to the loop; the descriptors go now.
  std::lock_guard guard(queue_lock_);
  epoll_.reset();
  wake_.reset();
  timer_.reset();
}

bool Loop::close_if_empty() {
  std::lock_guard guard(queue_lock_);
  closed_ = queue_.empty();
  return closed_;
}

void Loop::wake() {
  const uint64_t one = 1;
  std::lock_guard guard(queue_lock_);
  if (wake_.valid()) (void)!::write(wake_.get(), &one, sizeof one);
}

bool Loop::queue_empty() {
  std::lock_guard guard(queue_lock_);
  return queue_.empty();
}

// False once the loop has stopped: then the task dies with the caller.
bool Loop::push(Task& task) {
  if (!is_this_process(pid_)) return false;  // a forked child has no loop thread, and the parent's descriptors are gone
  std::lock_guard guard(queue_lock_);
  if (!closed_) queue_.push_back(std::move(task));
  return !closed_;
}

void Loop::post(Task task) {
  if (!push(task) || held()) return;  // a holder drains the queue at the end of its round
  wake();
}

void Loop::run(Task task) {
  if (push(task) && !held()) flush();
}

// Whoever holds the lock looks at the queue after giving it up, so a failed try loses nothing.
void Loop::flush() {
  while (!queue_empty()) {
    Hold hold(*this, std::unique_lock(lock_, std::try_to_lock));
    if (!hold) return;
    drain_on_loop();
  }
}

bool Loop::claim_lead(bool background) {
  for (int seen = kNobody; !led_.compare_exchange_strong(seen, background ? kBackground : kForeground);) {
    if (background || seen == kForeground) return false;
    if (seen == kBackground && !led_.compare_exchange_strong(seen, kAsked)) {
      seen = kNobody;
      continue;
    }
    wake();
    led_.wait(kAsked);
    seen = kNobody;
  }
  leader_.store(std::this_thread::get_id());
  return true;
}

Loop::Lead Loop::lead(Time until, bool (*done)(const void*), const void* what, Wait how) {
  if (!is_this_process(pid_) || held() || stopping_.load() || !claim_lead(how == Wait::background))
    return Lead::refused;
  const auto may_go_on = [&] { return led_.load() != kAsked && !done(what) && !stopping_.load(); };
  const bool looks = how == Wait::eager && looks_.worth_one();
  const Time sleep_at = looks ? after(kLook) : Time::min();
  bool sleeps = !looks;
  epoll_event events[kBatch];
  while (take_note(), may_go_on()) {
    const Time now = sleeps && until == Time::max() ? Time::min() : Clock::now();
    if (now >= until) break;
    sleeps = sleeps || now >= sleep_at;
    const int count = ::epoll_wait(epoll_.get(), events, kBatch, sleeps ? milliseconds(now, until) : 0);
    if (sleeps || count > 0) round(events, count);
  }
  if (looks) looks_.ended(!sleeps && done(what));
  leader_.store({});
  const bool asked = led_.exchange(kNobody) == kAsked;
  led_.notify_all();
  take_note();
  return asked ? Lead::gave_way : Lead::ended;
}

void Loop::nudge() {
  if (led_.load() != kNobody && leader_.load() != std::this_thread::get_id()) wake();
}

// Where the loop thread got what was for the leader. It would get it again and again while the leader is on its way.
void Loop::pass_on_to_leader() {
  if (led_.load() == kNobody || leader_.load() == std::this_thread::get_id()) return;
  passed_on_.store(true);
  if (led_.load() == kNobody) passed_on_.store(false);  // it left just now, and may not see this any more
  wake();
}

void Loop::take_note() {
  if (!passed_on_.load() || !passed_on_.exchange(false)) return;
  passed_on_.notify_all();
}

void Loop::round(const epoll_event* events, int count) {
  {
    Hold hold(*this, std::unique_lock(lock_));
    drain_on_loop();  // what was asked for before the events came: a watch that was ended hears of none
    dispatch_on_loop(events, count);
    drain_on_loop();
  }
  flush();
}

void Loop::barrier() {
  assert(!held());
  {
    Hold hold(*this, std::unique_lock(lock_));
    drain_on_loop();
  }
  flush();
}

void Loop::thread_main(const Task* first) {
  if (*first) (*first)();
  began_.store(true);
  began_.notify_one();
  Looks looks;
  epoll_event events[kBatch];
  while (true) {
    const int count = await_events(looks, events);
    wakeups_.fetch_add(1, std::memory_order_relaxed);
    round(events, count);
    passed_on_.wait(true);
    if (stopping_.load() && queue_empty()) return;
  }
}

int Loop::await_events(Looks& looks, epoll_event* events) {
  if (spin_ > 0 && looks.worth_one()) {
    int count = 0;
    for (const Time sleep_at = after(spin_); count == 0 && Clock::now() < sleep_at;)
      count = ::epoll_wait(epoll_.get(), events, kBatch, 0);
    looks.ended(count > 0);
    if (count > 0) return count;
  }
  return ::epoll_wait(epoll_.get(), events, kBatch, -1);
}

void Loop::dispatch_on_loop(const epoll_event* events, int count) {
  for (int i = 0; i < count; ++i) {
    const uint64_t token = events[i].data.u64;
    if (token == kWakeToken) {
      consume(wake_.get());
      // Not ours alone: a thread that leads must not eat the wake-up that ends the loop's thread, nor the loop
      // thread one that was for the leader.
      if (stopping_.load())
        wake();
      else
        pass_on_to_leader();
    } else if (token == kTimerToken) {
      consume(timer_.get());
      armed_ = Time::max();
      fire_timers_on_loop();
    } else {
      // The event may be stale: taken before the lock, and its watch ended since. Tokens are never used twice.
      const int fd = static_cast<int>(token >> 40);
      const auto same = [&](auto found) { return found != watches_.end() && found->second.token == token; };
      auto found = watches_.find(fd);
      if (!same(found)) continue;
      Watcher* const watcher = found->second.watcher;
      drained_fd_ = -1;
      guarded(name_, [&] { watcher->on_event(events[i].events); });
      // An end of the stream that came along with the last bytes makes no edge of its own.
      const bool ended = (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
      if (drained_fd_ == fd && !ended) continue;
      if (found = watches_.find(fd); same(found)) rearm_on_loop(fd, found->second);
    }
  }
}

// Edge-triggered towards the kernel: level-triggered, it would wake a second waiting thread for every event that it
// hands to a first. Asking anew after each event makes it level-triggered for the watcher.
void Loop::rearm_on_loop(int fd, const Watch& watch) {
  epoll_event event{to_kernel(watch.events), {.u64 = watch.token}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "can't change the watch of a descriptor", errno);
}

void Loop::drain_on_loop() {
  while (true) {
    {
      std::lock_guard guard(queue_lock_);
      if (queue_.empty()) return;
      round_.swap(queue_);
    }
    for (auto& task : round_) guarded(name_, std::exchange(task, nullptr));
    round_.clear();
  }
}

void Loop::watch_on_loop(int fd, uint32_t events, Watcher* watcher) {
  assert(held());
  const uint64_t token = static_cast<uint64_t>(fd) << 40 | (next_token_++ & ((1ull << 40) - 1));
  epoll_event event{to_kernel(events), {.u64 = token}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "can't watch a descriptor", errno);
  watches_[fd] = {token, events, watcher};
}

void Loop::change_on_loop(int fd, uint32_t events) {
  assert(held());
  Watch& watch = watches_.at(fd);
  watch.events = events;
  rearm_on_loop(fd, watch);
}

void Loop::unwatch_on_loop(int fd) {
  assert(held());
  if (watches_.erase(fd) != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

Loop::TimerId Loop::at_on_loop(Time when, Task task) {
  assert(held());
  const TimerId id{when, next_timer_++};
  timers_.emplace(id, std::move(task));
  if (when < armed_) arm_on_loop();
  return id;
}

void Loop::cancel_on_loop(const TimerId& id) {
  assert(held());
  timers_.erase(id);
  if (timers_.empty() && armed_ != Time::max()) arm_on_loop();  // an idle loop is not woken for nothing
}

void Loop::arm_on_loop() {
  itimerspec spec{};
  armed_ = timers_.empty() ? Time::max() : timers_.begin()->first.first;
  if (armed_ != Time::max()) {
    const auto ns = std::max<int64_t>(1, std::chrono::nanoseconds(armed_.time_since_epoch()).count());
    spec.it_value = {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  }
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

// Those due now. One that sets a next one for at once waits for its turn after the other events.
void Loop::fire_timers_on_loop() {
  const Time now = Clock::now();
  const uint64_t first_new = next_timer_;
  while (!timers_.empty() && timers_.begin()->first.first <= now && timers_.begin()->first.second < first_new) {
    auto node = timers_.extract(timers_.begin());
    guarded(name_, node.mapped());
  }
  arm_on_loop();
}

}  // namespace mr
