#include "workers.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "error.h"
#include "fd.h"
#include "thread.h"

namespace mr {
namespace {

constexpr std::chrono::seconds kLinger{5};  // of a thread that has nothing to do

}  // namespace

class Workers::Strand {
 public:
  std::deque<std::function<void()>> tasks;  // the first is being carried out, or its turn will come
};

struct Workers::State {
  State(std::string name, size_t max_threads) : name(std::move(name)), max_threads(max_threads), pid(this_pid()) {}

  const std::string name;
  const size_t max_threads;
  const int pid;
  std::mutex lock;  // and of the strands
  std::condition_variable wake, ended;
  std::deque<StrandRef> ready;  // that have a task which nobody is at
  size_t threads = 0, idle = 0;
  bool closed = false;
};

Workers::Workers(std::string thread_name, size_t max_threads)
    : state_(std::make_shared<State>(std::move(thread_name), max_threads)) {}

Workers::StrandRef Workers::new_strand() { return std::make_shared<Strand>(); }

bool Workers::run(std::function<void()> task, StrandRef strand) {
  if (!is_this_process(state_->pid)) return false;
  if (!strand) strand = new_strand();
  std::lock_guard guard(state_->lock);
  if (state_->closed) return false;
  if (state_->ready.size() >= state_->idle && state_->threads < state_->max_threads) {
    try {
      start_without_signals(state_->name, [state = state_] { thread_main(state); }).detach();
      ++state_->threads;
    } catch (const Error&) {
      if (state_->threads == 0) return false;
    }
  }
  strand->tasks.push_back(std::move(task));
  if (strand->tasks.size() == 1) state_->ready.push_back(std::move(strand));
  state_->wake.notify_one();
  return true;
}

bool Workers::close(double limit) {
  if (!is_this_process(state_->pid)) return true;  // the threads stayed behind in the parent
  std::unique_lock guard(state_->lock);
  state_->closed = true;
  state_->wake.notify_all();
  const auto none = [this] { return state_->threads == 0; };
  if (limit >= 0) return state_->ended.wait_for(guard, std::chrono::duration<double>(limit), none);
  state_->ended.wait(guard, none);
  return true;
}

void Workers::thread_main(const std::shared_ptr<State>& state) {
  std::unique_lock guard(state->lock);
  while (true) {
    ++state->idle;
    const bool called = state->wake.wait_for(guard, kLinger, [&] { return state->closed || !state->ready.empty(); });
    --state->idle;
    if (!called || state->ready.empty()) break;
    const StrandRef strand = std::move(state->ready.front());
    state->ready.pop_front();
    auto task = std::move(strand->tasks.front());
    guard.unlock();
    task();
    task = nullptr;  // what it holds goes before the next one begins
    guard.lock();
    strand->tasks.pop_front();
    if (strand->tasks.empty()) continue;
    state->ready.push_back(strand);
    state->wake.notify_one();
  }
  --state->threads;
  state->ended.notify_all();
}

}  // namespace mr
