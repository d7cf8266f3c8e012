// The event loop under every kind of caller: order, no lost task, no stale event, timers, and nothing while idle.
#include "base/loop.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <condition_variable>
#include <ctime>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace mr;

namespace {

constexpr auto kLong = std::chrono::seconds(20);  // fails a test instead of hanging it

template <typename T>
T await(std::future<T> future) {
  if (future.wait_for(kLong) != std::future_status::ready) throw test::CheckFailed("waited in vain");
  return future.get();
}

void await_true(const std::function<bool()>& condition) {
  const auto end = Clock::now() + kLong;
  while (!condition()) {
    if (Clock::now() > end) throw test::CheckFailed("waited in vain");
    std::this_thread::yield();
  }
}

Loop::Lead lead_a_little(Loop& loop, Loop::Wait how = Loop::Wait::eager) {
  return loop.lead(after(0.001), [](const void*) { return false; }, nullptr, how);
}

// Something that happens once, on any thread. Who has waited for it may destroy it: who sets it has let go.
class Event {
 public:
  void set() {
    std::lock_guard guard(lock_);
    if (std::exchange(happened_, true)) throw std::logic_error("it happens twice");
    thread_ = std::this_thread::get_id();
    changed_.notify_all();
  }
  std::thread::id wait() {
    std::unique_lock guard(lock_);
    if (!changed_.wait_for(guard, kLong, [&] { return happened_; })) throw test::CheckFailed("waited in vain");
    return thread_;
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool happened_ = false;
  std::thread::id thread_;
};

class Pipe {
 public:
  Pipe() {
    int fds[2];
    CHECK_EQ(::pipe2(fds, O_CLOEXEC | O_NONBLOCK), 0);
    read_ = Fd(fds[0]);
    write_ = Fd(fds[1]);
  }
  int fd() const { return read_.get(); }
  void fill() { CHECK_EQ(::write(write_.get(), "x", 1), 1); }
  void drain() {
    char byte;
    while (::read(read_.get(), &byte, 1) == 1) {
    }
  }
  Fd take_read_end() { return std::move(read_); }
  void close_write_end() { write_.reset(); }

 private:
  Fd read_, write_;
};

struct Watch : Loop::Watcher {
  std::function<void(uint32_t)> body;
  int calls = 0;  // on the loop
  void on_event(uint32_t events) override {
    ++calls;
    if (body) body(events);
  }
};

// On the loop, and done when this returns.
void on(Loop& loop, const std::function<void()>& work) {
  Event done;
  std::exception_ptr failure;
  loop.run([&] {
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    done.set();
  });
  done.wait();
  if (failure) std::rethrow_exception(failure);
}

std::thread::id thread_of(Loop& loop) {
  Event ran;
  loop.post([&] { ran.set(); });
  return ran.wait();
}

// A thread that is on the loop until let go.
class Holder {
 public:
  explicit Holder(Loop& loop) {
    thread_ = std::thread([this, &loop] {
      loop.run([this] {
        inside_.set_value();
        let_go_.get_future().wait();
      });
    });
    id = thread_.get_id();
    await(inside_.get_future());
  }
  void let_go() {
    let_go_.set_value();
    thread_.join();
  }
  std::thread::id id;

 private:
  std::promise<void> inside_, let_go_;
  std::thread thread_;
};

// --- Tasks.

TEST(run_is_at_once_where_the_loop_is_free) {
  Loop loop("test");
  thread_of(loop);
  loop.barrier();
  std::thread::id ran;
  bool held = false;
  loop.run([&] { ran = std::this_thread::get_id(), held = loop.held(); });
  CHECK(ran == std::this_thread::get_id());
  CHECK(held);
  CHECK(!loop.held());
}

TEST(run_is_never_recursive) {
  Loop loop("test");
  std::vector<int> order;
  on(loop, [&] {
    loop.run([&] {
      order.push_back(2);
      loop.post([&] { order.push_back(4); });
      order.push_back(3);
    });
    loop.post([&] { order.push_back(5); });
    order.push_back(1);
  });
  loop.barrier();
  CHECK_EQ(order.size(), 5u);
  CHECK(order == (std::vector<int>{1, 2, 3, 5, 4}));
}

TEST(post_is_left_to_the_loop_thread) {
  Loop loop("test");
  for (int i = 0; i < 100; ++i) CHECK(thread_of(loop) != std::this_thread::get_id());
}

TEST(run_does_not_wait_for_the_holder_who_takes_the_task_over) {
  Loop loop("test");
  Holder holder(loop);
  Event ran;
  loop.run([&] { ran.set(); });  // returns, though the loop is taken
  holder.let_go();
  CHECK(ran.wait() == holder.id);
}

TEST(post_to_a_held_loop_is_not_lost) {
  Loop loop("test");
  for (int i = 0; i < 200; ++i) {
    Holder holder(loop);
    Event ran;
    loop.post([&] { ran.set(); });
    holder.let_go();
    ran.wait();
  }
}

TEST(no_task_is_lost_or_out_of_order_under_contention) {
  constexpr int kThreads = 8, kTasks = 8000;
  Loop loop("test");
  // Written on the loop only: a race here is one that the thread sanitiser sees.
  std::vector<int> next(kThreads, 0);
  int total = 0;
  bool in_order = true;
  std::atomic<int> destroyed{0};
  struct Counted {
    std::atomic<int>& destroyed;
    ~Counted() { ++destroyed; }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kTasks; ++i) {
        Task task = [&, t, i, counted = std::make_shared<Counted>(destroyed)] {
          in_order &= next[t]++ == i;
          ++total;
        };
        // One thread's tasks keep their order, whichever way they come.
        if ((i + t) % 3 == 0)
          loop.post(std::move(task));
        else
          loop.run(std::move(task));
        if (i % 7 == 0) loop.run_here([] {});
      }
    });
  for (auto& thread : threads) thread.join();
  await_true([&] { return destroyed == kThreads * kTasks; });
  loop.barrier();
  on(loop, [&] {
    CHECK(in_order);
    CHECK_EQ(total, kThreads * kTasks);
  });
}

TEST(each_single_task_gets_through) {
  // Every task is the last one for a while: a lost wake-up would leave it lying.
  Loop loop("test");
  std::atomic<bool> quit{false};
  std::thread spinner([&] {
    while (!quit) lead_a_little(loop);
  });
  for (int i = 0; i < 3000; ++i) {
    Event ran;
    if (i % 2 == 0)
      loop.run([&] { ran.set(); });
    else
      loop.post([&] { ran.set(); });
    ran.wait();
  }
  quit = true;
  spinner.join();
}

TEST(whoever_is_on_the_loop_takes_over_what_others_could_not_run) {
  // Two threads meet on the loop, and then nobody comes until both are done: nothing may lie there.
  Loop loop("test");
  thread_of(loop);
  loop.barrier();
  constexpr int kRounds = 20000, kLeast = 100;
  const Time enough = after(10);  // where others use the processors too each turn waits for one
  std::atomic<int> started{0}, finished{0};
  std::atomic<bool> over{false};
  const auto wait_for = [](std::atomic<int>& value, int wanted) {
    for (int spins = 0; value.load() < wanted; ++spins)
      if (spins > 2000) std::this_thread::yield();
  };
  int ran = 0;  // on the loop
  std::thread other([&] {
    for (int round = 1; wait_for(started, round), !over; ++round) {
      loop.run([&] { ++ran; });
      finished = round;
    }
  });
  int round = 1, expected = 0, left_behind = 0;
  for (; round <= kRounds && (round <= kLeast || Clock::now() < enough); ++round) {
    started = round;
    const bool runs = round % 2 == 0;
    if (runs)
      loop.run([&] { ++ran; });
    else
      loop.run_here([] {});
    expected += 1 + runs;
    wait_for(finished, round);
    left_behind += ran != expected;
  }
  over = true;
  started = round;
  other.join();
  CHECK_EQ(left_behind, 0);
}

TEST(a_task_that_throws_stops_nothing) {
  Loop loop("throws");
  loop.run([] { throw Error(MR_CONFIG, "expected on stderr: this test throws it"); });
  Event ran;
  loop.run([&] { ran.set(); });
  ran.wait();
  thread_of(loop);
}

TEST(barrier_waits_for_whoever_is_inside) {
  Loop loop("test");
  Holder holder(loop);
  std::promise<void> called, passed;
  std::thread waiter([&] {
    called.set_value();
    loop.barrier();
    passed.set_value();
  });
  await(called.get_future());
  auto is_past = passed.get_future();
  CHECK(is_past.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  holder.let_go();
  waiter.join();
  await(std::move(is_past));
}

TEST(barrier_sees_queued_tasks_done) {
  Loop loop("test");
  Holder holder(loop);
  bool ran = false;
  loop.run([&] { ran = true; });
  std::thread other([&] { holder.let_go(); });
  loop.barrier();
  CHECK(ran);
  other.join();
}

// --- Events.

TEST(events_arrive_by_themselves) {
  Loop loop("test");
  Pipe pipe;
  Watch watch;
  Event seen;
  watch.body = [&](uint32_t events) {
    CHECK((events & EPOLLIN) != 0);
    pipe.drain();
    seen.set();
  };
  on(loop, [&] { loop.watch_on_loop(pipe.fd(), EPOLLIN, &watch); });
  pipe.fill();
  CHECK(seen.wait() != std::this_thread::get_id());
  on(loop, [&] { loop.unwatch_on_loop(pipe.fd()); });
}

TEST(who_leads_handles_what_comes) {
  Loop loop("test");
  Pipe pipe;
  Watch watch;
  std::atomic<int> here{0}, elsewhere{0};
  const auto self = std::this_thread::get_id();
  watch.body = [&](uint32_t) {
    pipe.drain();
    ++(std::this_thread::get_id() == self ? here : elsewhere);
  };
  on(loop, [&] { loop.watch_on_loop(pipe.fd(), EPOLLIN, &watch); });
  // The loop thread is at it too and may be faster; it is not every time.
  await_true([&] {
    const int before = here + elsewhere;
    pipe.fill();
    await_true([&] {
      lead_a_little(loop);
      return here + elsewhere > before;
    });
    return here > 0;
  });
  on(loop, [&] { loop.unwatch_on_loop(pipe.fd()); });
}

TEST(run_here_does_not_wait_for_a_holder) {
  Loop loop("test");
  int ran = 0;
  Holder holder(loop);
  CHECK(!loop.run_here([&] { ++ran; }));
  holder.let_go();
  loop.barrier();
  await_true([&] { return loop.run_here([&] { ++ran; }); });
  on(loop, [&] { CHECK(!loop.run_here([&] { ++ran; })); });  // never recursive
  CHECK_EQ(ran, 1);
}

// A thread that leads until it is told that it is done.
class Leader {
 public:
  Leader(Loop& loop, Loop::Wait wait) : loop_(loop) {
    thread_ = std::thread([this, wait] {
      const auto is_over = [](const void* leader) {
        auto& self = *static_cast<Leader*>(const_cast<void*>(leader));
        self.leads = true;
        return self.done_.load();
      };
      how_.set_value(loop_.lead(Time::max(), is_over, this, wait));
    });
  }
  ~Leader() {
    done_ = true;
    loop_.nudge();
    thread_.join();
  }
  Loop::Lead how() { return await(how_.get_future()); }
  void end() {
    done_ = true;
    loop_.nudge();
  }
  std::atomic<bool> leads{false};

 private:
  Loop& loop_;
  std::atomic<bool> done_{false};
  std::promise<Loop::Lead> how_;
  std::thread thread_;
};

TEST(a_nudge_reaches_the_leader_and_one_leads_at_a_time) {
  Loop loop("test");
  for (int i = 0; i < 200; ++i) {
    Leader leader(loop, i % 2 == 0 ? Loop::Wait::background : i % 4 == 1 ? Loop::Wait::eager : Loop::Wait::patient);
    await_true([&] { return leader.leads.load(); });
    if (i % 2 == 1) CHECK(lead_a_little(loop) == Loop::Lead::refused);
    leader.end();
    CHECK(leader.how() == Loop::Lead::ended);
  }
}

TEST(looks_that_find_nothing_get_rare_and_come_back) {
  Looks looks;
  const auto out_of = [&](int waits, bool found) {
    int looked = 0;
    for (int i = 0; i < waits; ++i) {
      if (!looks.worth_one()) continue;
      ++looked;
      looks.ended(found);
    }
    return looked;
  };
  CHECK_EQ(out_of(100, true), 100);
  CHECK(out_of(10000, false) < 60);
  CHECK(out_of(10000, true) > 9000);
  CHECK_EQ(out_of(100, true), 100);
}

TEST(a_loop_that_looks_before_it_sleeps_is_as_quick_to_end_and_sleeps_when_idle) {
  {
    Loop patient("test", {}, 1.0);
    for (int i = 0; i < 100; ++i) {
      Event ran;
      patient.post([&] { ran.set(); });
      ran.wait();
    }
  }  // at once: in the middle of a look
  Loop loop("test", {}, 0.001);
  thread_of(loop);
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const std::clock_t before = std::clock();  // of all threads
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(std::clock() - before < CLOCKS_PER_SEC / 10);
}

TEST(one_in_the_background_gives_way) {
  Loop loop("test");
  for (int i = 0; i < 200; ++i) {
    Leader behind(loop, Loop::Wait::background);
    await_true([&] { return behind.leads.load(); });
    Leader first(loop, Loop::Wait::eager), second(loop, Loop::Wait::patient);
    CHECK(behind.how() == Loop::Lead::gave_way);
    await_true([&] { return first.leads || second.leads; });
    CHECK(lead_a_little(loop) == Loop::Lead::refused);
  }
}

TEST(wake_ups_and_tasks_get_through_while_leaders_come_and_go) {
  // The loop thread takes what is for a leader now and then, and must neither keep it nor lie down for ever.
  Loop loop("test");
  std::atomic<bool> quit{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      while (!quit) lead_a_little(loop, t == 0 ? Loop::Wait::background : Loop::Wait::eager);
    });
  for (int i = 0; i < 3000; ++i) {
    Event ran;
    loop.post([&] { ran.set(); });
    loop.nudge();
    ran.wait();
  }
  quit = true;
  for (auto& thread : threads) thread.join();
  thread_of(loop);
}

TEST(a_watch_can_change_what_it_waits_for) {
  Loop loop("test");
  Pipe pipe;
  Watch watch;
  std::atomic<int> calls{0};
  watch.body = [&](uint32_t) {
    ++calls;
    loop.change_on_loop(pipe.fd(), 0);
  };
  pipe.fill();
  on(loop, [&] { loop.watch_on_loop(pipe.fd(), 0, &watch); });
  thread_of(loop);
  CHECK_EQ(calls.load(), 0);
  for (int i = 1; i <= 3; ++i) {
    on(loop, [&] { loop.change_on_loop(pipe.fd(), EPOLLIN); });
    await_true([&] { return calls == i; });
    thread_of(loop);
    CHECK_EQ(calls.load(), i);
  }
  on(loop, [&] { loop.unwatch_on_loop(pipe.fd()); });
}

TEST(an_event_taken_before_its_watch_ended_is_dropped) {
  for (int round = 0; round < 50; ++round) {
    Loop loop("test");
    thread_of(loop);
    loop.barrier();
    Watch old_watch, new_watch;
    Pipe old_pipe, new_pipe;
    Fd same_number;
    old_pipe.fill();
    Event new_seen;
    new_watch.body = [&](uint32_t) {
      loop.unwatch_on_loop(same_number.get());
      new_seen.set();
    };
    loop.run([&] {
      // The loop thread takes the event, counts a wake-up, and waits for us.
      const uint64_t before = loop.wakeups();
      const int number = old_pipe.fd();
      loop.watch_on_loop(number, EPOLLIN, &old_watch);
      await_true([&] { return loop.wakeups() != before; });
      loop.unwatch_on_loop(number);
      old_pipe.take_read_end().reset();
      // The number is used again: the old event must not reach the new watch either.
      CHECK_EQ(::dup3(new_pipe.fd(), number, O_CLOEXEC), number);
      same_number = Fd(number);
      loop.watch_on_loop(number, EPOLLIN, &new_watch);
    });
    thread_of(loop);
    on(loop, [&] {
      CHECK_EQ(old_watch.calls, 0);
      CHECK_EQ(new_watch.calls, 0);
    });
    new_pipe.fill();
    new_seen.wait();
  }
}

TEST(one_handler_may_end_the_watch_of_another_ready_one) {
  for (int round = 0; round < 50; ++round) {
    Loop loop("test");
    Pipe pipes[2];
    Watch watches[2];
    Event first;
    for (int i = 0; i < 2; ++i)
      watches[i].body = [&](uint32_t) {
        for (auto& pipe : pipes) loop.unwatch_on_loop(pipe.fd());
        first.set();  // twice would throw
      };
    on(loop, [&] {
      for (int i = 0; i < 2; ++i) loop.watch_on_loop(pipes[i].fd(), EPOLLIN, &watches[i]);
      for (auto& pipe : pipes) pipe.fill();
    });
    first.wait();
    thread_of(loop);
    on(loop, [&] { CHECK_EQ(watches[0].calls + watches[1].calls, 1); });
  }
}

TEST(a_watcher_may_end_itself) {
  Loop loop("test");
  Pipe pipe;
  auto watch = std::make_unique<Watch>();
  Event gone;
  watch->body = [&](uint32_t) {
    loop.unwatch_on_loop(pipe.fd());
    loop.post([&] {
      watch.reset();
      gone.set();
    });
  };
  on(loop, [&] { loop.watch_on_loop(pipe.fd(), EPOLLIN, watch.get()); });
  pipe.fill();
  gone.wait();
}

TEST(what_can_not_be_watched_is_an_error) {
  Loop loop("test");
  Watch watch;
  Fd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  on(loop, [&] {
    CHECK_THROWS(Error, loop.watch_on_loop(file.get(), EPOLLIN, &watch));
    CHECK_THROWS(Error, loop.watch_on_loop(-1, EPOLLIN, &watch));
    loop.unwatch_on_loop(12345);  // no watch: nothing to do
  });
}

// --- Timers.

TEST(timers_fire_in_order_and_not_early) {
  Loop loop("test");
  std::vector<int> order;
  bool early = false;
  Event done;
  on(loop, [&] {
    const Time now = Clock::now();
    const auto at = [&](int us, int number) {
      const Time when = now + std::chrono::microseconds(us);
      loop.at_on_loop(when, [&, when, number] {
        early |= Clock::now() < when;
        order.push_back(number);
        if (order.size() == 7) done.set();
      });
    };
    at(20300, 5);
    at(10000, 2);
    at(20000, 3);
    at(20000, 4);  // the same time: in the order they were made
    at(-1000000, 1);
    at(30000, 6);
    at(30300, 7);
  });
  done.wait();
  on(loop, [&] {
    CHECK(order == (std::vector<int>{1, 2, 3, 4, 5, 6, 7}));
    CHECK(!early);
  });
}

TEST(cancelled_timers_do_not_fire) {
  Loop loop("test");
  bool fired = false;
  Event done;
  Loop::TimerId third;
  on(loop, [&] {
    const Time soon = after(0.005);
    const auto first = loop.at_on_loop(soon, [&] { fired = true; });
    loop.at_on_loop(soon, [&] { loop.cancel_on_loop(third); });  // from another one, due at the same time
    third = loop.at_on_loop(soon, [&] { fired = true; });
    loop.cancel_on_loop(first);
    loop.cancel_on_loop(first);  // again: nothing
    loop.at_on_loop(after(0.02), [&] { done.set(); });
  });
  done.wait();
  on(loop, [&] { CHECK(!fired); });
}

TEST(a_sooner_timer_comes_first) {
  Loop loop("test");
  Event soon;
  on(loop, [&] {
    loop.at_on_loop(after(3600), [] {});
    loop.at_on_loop(after(0.001), [&] { soon.set(); });
  });
  soon.wait();
  Event sooner;
  on(loop, [&] { loop.at_on_loop(after(0.001), [&] { sooner.set(); }); });
  sooner.wait();
}

TEST(a_timer_that_sets_itself_for_the_past_starves_nobody) {
  Loop loop("test");
  Pipe pipe;
  Watch watch;
  std::atomic<bool> quit{false}, seen{false};
  std::atomic<int> fired{0};
  std::function<void()> again = [&] {
    ++fired;
    if (!quit) loop.at_on_loop(Time{}, again);
  };
  watch.body = [&](uint32_t) {
    seen = true;
    loop.unwatch_on_loop(pipe.fd());
  };
  on(loop, [&] {
    loop.watch_on_loop(pipe.fd(), EPOLLIN, &watch);
    loop.at_on_loop(Clock::now(), again);
  });
  await_true([&] { return fired > 3; });
  pipe.fill();
  const auto end = Clock::now() + std::chrono::seconds(5);
  while (!seen && Clock::now() < end) std::this_thread::yield();
  quit = true;
  loop.stop();
  CHECK(seen);
}

TEST(timers_fire_while_another_thread_leads) {
  Loop loop("test");
  for (int i = 0; i < 50; ++i) {
    std::atomic<bool> fired{false};
    on(loop, [&] { loop.at_on_loop(after(0.0005), [&] { fired = true; }); });
    await_true([&] {
      lead_a_little(loop);
      return fired.load();
    });
  }
}

TEST(any_number_of_seconds_is_a_time) {
  const Time now = Clock::now();
  for (const double past : {0.0, -1.0, -1e300, -std::numeric_limits<double>::infinity(), std::nan("")})
    CHECK(after(past) >= now && after(past) < now + std::chrono::hours(1));
  for (const double future : {1e8, 1e18, 1e300, std::numeric_limits<double>::infinity()})
    CHECK(after(future) > now + std::chrono::hours(24 * 365));
  Loop loop("test");
  on(loop, [&] {
    loop.at_on_loop(Time::max(), [] {});
    loop.at_on_loop(after(1e300), [] {});
  });
}

// --- Idle, and the end.

TEST(an_idle_loop_does_not_wake) {
  Loop loop("test");
  thread_of(loop);
  loop.barrier();
  Event later;
  uint64_t before = 0;
  on(loop, [&] {
    loop.cancel_on_loop(loop.at_on_loop(after(0.02), [] {}));  // leaves nothing to wake for
    before = loop.wakeups();
    loop.at_on_loop(after(0.2), [&] { later.set(); });
  });
  later.wait();
  CHECK_EQ(loop.wakeups() - before, 1u);
}

TEST(work_from_other_threads_does_not_wake_the_loop_thread) {
  Loop loop("test");
  thread_of(loop);
  loop.barrier();
  const uint64_t before = loop.wakeups();
  int count = 0;
  for (int i = 0; i < 1000; ++i) loop.run([&] { ++count; });
  CHECK_EQ(count, 1000);
  on(loop, [&] { loop.post([&] { ++count; }); });  // to itself: no wake-up needed
  loop.barrier();
  CHECK_EQ(count, 1001);
  // Whatever woke it before this timer would be counted too.
  Event later;
  on(loop, [&] { loop.at_on_loop(after(0.05), [&] { later.set(); }); });
  later.wait();
  CHECK_EQ(loop.wakeups() - before, 1u);
}

TEST(stop_runs_what_is_queued_and_drops_the_rest) {
  Loop loop("test");
  auto token = std::make_shared<int>(0);
  on(loop, [&] { loop.at_on_loop(after(3600), [token] {}); });
  int ran = 0;
  for (int i = 0; i < 100; ++i) loop.post([&] { ++ran; });
  loop.stop();
  CHECK_EQ(ran, 100);
  loop.post([&ran, token] { ++ran; });
  loop.run([&ran, token] { ++ran; });
  CHECK(!loop.run_here([&] { ++ran; }));
  CHECK(lead_a_little(loop) == Loop::Lead::refused);
  loop.barrier();
  CHECK_EQ(ran, 100);
  CHECK_EQ(token.use_count(), 1);  // neither tasks nor timers keep what they own
  loop.stop();                     // again: nothing
}

TEST(stop_ends_whatever_other_threads_do) {
  // A thread that leads takes wake-ups away from the loop thread; none may be the one that ends it.
  for (int round = 0; round < 100; ++round) {
    auto loop = std::make_unique<Loop>("test");
    std::atomic<bool> quit{false};
    std::thread spinner([&] {
      while (!quit) lead_a_little(*loop);
    });
    std::thread runner([&] {
      while (!quit) loop->run([] {});
    });
    auto stopped = std::async(std::launch::async, [&] { loop->stop(); });
    const bool in_time = stopped.wait_for(kLong) == std::future_status::ready;
    if (!in_time) std::abort();  // nothing can be taken down in order any more
    quit = true;
    spinner.join();
    runner.join();
  }
}

TEST(the_loop_thread_leaves_signals_to_the_program) {
  Loop loop("test");
  sigset_t blocked;
  Event asked;
  loop.post([&] {
    ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    asked.set();
  });
  asked.wait();
  for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD, SIGALRM, SIGPROF}) CHECK_EQ(::sigismember(&blocked, signal), 1);
  for (int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) CHECK_EQ(::sigismember(&blocked, crash), 0);
  sigset_t here;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &here);
  CHECK_EQ(::sigismember(&here, SIGINT), 0);
}

TEST(a_forked_child_can_destroy_a_loop_and_the_parent_goes_on) {
  auto loop = std::make_unique<Loop>("test");
  thread_of(*loop);
  Holder holder(*loop);  // the lock is taken at the time of the fork, and stays so in the child
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    loop.reset();
    ::_exit(7);
  }
  holder.let_go();
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 7);
  thread_of(*loop);
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
