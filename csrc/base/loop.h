// The event loop. "On the loop" means: while holding the loop's lock, which the loop thread takes for each round of
// events, and which any other thread may take for a moment to start work without waking the loop thread (run), or to
// handle events itself while it waits for one (lead). Functions named *_on_loop demand it.
#pragma once

#include <sys/epoll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fd.h"

namespace mr {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Task = std::function<void()>;

// Negative counts as none, and more than 30 years as 30: no double overflows the clock.
inline Time after(double seconds) {
  const double bounded = seconds > 0 ? std::min(seconds, 1e9) : 0;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

// Whether to look for events for a moment before sleeping. To wake a processor up takes tens of microseconds, often
// more than an answer takes. Each look that finds nothing makes the next ones rarer: the answer takes longer, or
// whoever is to give it waits for this very processor (Karlin et al. 1991, "Empirical Studies of Competitive
// Spinning").
class Looks {
 public:
  bool worth_one() { return left_out_ == 0 || left_out_-- == 0; }
  void ended(bool found) {
    pause_ = found ? pause_ / 2 : std::min(2 * pause_ + 1, kMaxPause);
    left_out_ = pause_;
  }

 private:
  static constexpr uint32_t kMaxPause = 255;  // waits
  uint32_t pause_ = 0, left_out_ = 0;
};

class Loop {
 public:
  class Watcher {
   public:
    virtual void on_event(uint32_t events) = 0;

   protected:
    ~Watcher() = default;
  };
  using TimerId = std::pair<Time, uint64_t>;

  // `first` is run by the loop's thread, which lives until stop(), before this returns. With `spin` (seconds) that
  // thread looks for so long before it sleeps.
  explicit Loop(std::string thread_name, const Task& first = {}, double spin = 0);
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Joins the thread. Queued tasks have run; later ones are dropped, and so are the timers. Not from the loop. In a
  // forked child, where there is no thread, nothing of all this.
  void stop();

  // Runs task on the loop: at once where the lock is free, else by whoever holds it. Never recursive. Other threads'
  // tasks may run inside the call: hold no lock that they take. Tasks, timers and watchers do not throw.
  void run(Task task);
  // Runs work on the loop inside this call, after all that was queued before it; false, and nothing, where another
  // thread is on the loop, or this one. The same rules.
  template <typename Work>
  bool run_here(Work&& work);
  // Runs task by the loop thread or the next holder, never inside this call.
  void post(Task task);
  // Waits for events in the loop thread's stead and handles them, until done(what) or `until`: who waits for an answer
  // gets it without a hop from thread to thread. The kernel wakes the thread that began to wait last, so the loop
  // thread sleeps on. One thread at a time: refused at once where another leads, or on the loop, or when it has
  // stopped. One that leads in the background gives way to one that does not; an eager one looks before it sleeps.
  enum class Lead { refused, gave_way, ended };
  enum class Wait { eager, patient, background };
  Lead lead(Time until, bool (*done)(const void*), const void* what, Wait how = Wait::patient);
  // For who made done(what) true without an event: the leader looks again.
  void nudge();
  // Returns when no other thread is on the loop, and nothing started before is. Not from the loop.
  void barrier();

  bool held() const { return holder_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  // On the loop. A watcher must outlive its watch. Level-triggered for the watcher: see rearm_on_loop.
  void watch_on_loop(int fd, uint32_t events, Watcher* watcher);
  void change_on_loop(int fd, uint32_t events);
  void unwatch_on_loop(int fd);
  // Inside on_event, saves a system call: all that made `fd` ready was taken (EAGAIN, or a short read).
  void drained_on_loop(int fd) { drained_fd_ = fd; }
  TimerId at_on_loop(Time when, Task task);
  void cancel_on_loop(const TimerId& id);  // unknown ids are ignored: the timer may have fired

  uint64_t wakeups() const { return wakeups_.load(std::memory_order_relaxed); }

 private:
  // The lock and the mark of who holds it.
  class Hold {
   public:
    Hold(Loop& loop, std::unique_lock<std::mutex> lock) : loop_(loop), lock_(std::move(lock)) {
      if (lock_) loop_.holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ~Hold() {
      if (lock_) loop_.holder_.store(std::thread::id{}, std::memory_order_relaxed);
    }
    explicit operator bool() const { return lock_.owns_lock(); }

   private:
    Loop& loop_;
    std::unique_lock<std::mutex> lock_;
  };
  struct Watch {
    uint64_t token;
    uint32_t events;
    Watcher* watcher;
  };

  enum LedBy : int { kNobody, kForeground, kBackground, kAsked };  // kAsked: one in the background, to give way

  bool claim_lead(bool background);
  void pass_on_to_leader();
  void take_note();
  void thread_main(const Task* first);
  int await_events(Looks& looks, epoll_event* events);
  void round(const epoll_event* events, int count);
  void rearm_on_loop(int fd, const Watch& watch);
  void dispatch_on_loop(const epoll_event* events, int count);
  void drain_on_loop();
  void fire_timers_on_loop();
  void arm_on_loop();
  bool push(Task& task);
  bool queue_empty();
  void flush();
  bool close_if_empty();
  void wake();

  const std::string name_;
  const int pid_;
  const double spin_;
  Fd epoll_, wake_, timer_;
  std::mutex lock_;  // "the loop"
  std::atomic<std::thread::id> holder_{};
  std::mutex queue_lock_;
  std::vector<Task> queue_;                 // under queue_lock_
  bool closed_ = false;                     // under queue_lock_: takes no more tasks
  std::vector<Task> round_;                 // on the loop: those being run, kept for its memory
  std::unordered_map<int, Watch> watches_;  // by descriptor
  std::map<TimerId, Task> timers_;
  int drained_fd_ = -1;
  Time armed_ = Time::max();
  uint64_t next_token_ = 2, next_timer_ = 1;
  bool stopped_ = false;  // on the loop
  std::atomic<bool> stopping_{false};
  std::atomic<int> led_{kNobody};
  std::atomic<std::thread::id> leader_{};
  Looks looks_;                         // the leader's
  std::atomic<bool> passed_on_{false};  // a wake-up for the leader; the loop thread waits until it has taken note
  std::atomic<uint64_t> wakeups_{0};
  std::atomic<bool> began_{false};
  std::unique_ptr<std::thread> thread_;
};

template <typename Work>
bool Loop::run_here(Work&& work) {
  if (!is_this_process(pid_) || held()) return false;
  {
    Hold hold(*this, std::unique_lock(lock_, std::try_to_lock));
    if (!hold || stopped_) return false;
    drain_on_loop();
    work();
    drain_on_loop();
  }
  flush();
  return true;
}

}  // namespace mr
