#include "copy_pool.h"

#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <deque>

#include "../base/per_process.h"
#include "../base/thread.h"

namespace mr {
namespace {

// A chunk is what a stop or a loss of the peer waits for: about a millisecond. Smaller ones let several threads share
// a copy of a few MiB; below kMinChunk their bookkeeping shows.
constexpr uint64_t kMaxChunk = 4u << 20, kMinChunk = 256u << 10;
constexpr uint64_t kChunksPerThread = 4;

uint64_t chunk_bytes(uint64_t bytes, uint32_t threads, uint64_t max_chunk) {
  const uint64_t even = bytes / (uint64_t{threads} * kChunksPerThread);
  return std::min(std::clamp(even / kMinChunk * kMinChunk, kMinChunk, kMaxChunk), max_chunk);
}

uint32_t num_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return ::sched_getaffinity(0, sizeof cores, &cores) == 0 ? std::max(1, CPU_COUNT(&cores)) : 1;
}

}  // namespace

// Shared by the pool, its threads and the tasks, whoever lives longest.
struct CopyPool::State {
  std::mutex lock;
  std::condition_variable work;
  std::deque<std::shared_ptr<Task>> queue;  // tasks with chunks that nobody has claimed
  bool stopping = false;

  void worker();
};

class CopyPool::Task : public OpHelper, public std::enable_shared_from_this<Task> {
 public:
  Task(std::shared_ptr<State> state, std::shared_ptr<CopyJob> job, uint64_t bytes, uint32_t max_threads,
       uint64_t max_chunk)
      : state_(std::move(state)),
        job_(std::move(job)),
        bytes_(bytes),
        chunk_(chunk_bytes(bytes, max_threads, max_chunk)),
        num_chunks_((bytes + chunk_ - 1) / chunk_),
        max_threads_(max_threads) {}

  void help(const mr_op&, Time until) override {
    Role role;
    {
      std::lock_guard guard(state_->lock);
      role = join_locked();
    }
    if (role != Role::none) work(role, until, 1);
  }

  enum class Role : uint8_t { none, first, another };
  Role join_locked() {
    if (phase_ == Phase::beginning || phase_ == Phase::drained || inside_ == max_threads_) return Role::none;
    ++inside_;
    if (phase_ == Phase::open) return Role::another;
    phase_ = Phase::beginning;
    return Role::first;
  }

  // By a thread that has joined. Returns at `until`, or when no chunk is left to claim. `on_their_way`: threads that
  // have been woken for this task besides this one.
  void work(Role role, Time until, uint64_t on_their_way) {
    const auto self = shared_from_this();  // the job's end may give up the last other reference
    if (role == Role::first) begin(on_their_way);
    uint64_t moved = 0;
    Status status;
    bool drained = false;
    while (!drained && (until == Time::max() || Clock::now() < until)) {
      const uint64_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
      drained = chunk >= num_chunks_;
      if (drained) break;
      status = job_->copy(chunk * chunk_, std::min(chunk_, bytes_ - chunk * chunk_));
      if (!status.ok()) break;
      ++moved;
    }
    leave(std::move(status), moved, drained);
  }

 private:
  enum class Phase : uint8_t { queued, beginning, open, drained };

  void begin(uint64_t on_their_way) {
    Status status = job_->begin();
    const bool ok = status.ok();
    {
      std::lock_guard guard(state_->lock);
      phase_ = Phase::open;
      if (!ok) fail_locked(std::move(status));
    }
    const uint64_t useful = ok ? std::min<uint64_t>(max_threads_, num_chunks_) : 0;
    for (uint64_t i = 1 + on_their_way; i < useful; ++i) state_->work.notify_one();
  }

  void leave(Status status, uint64_t moved, bool drained) {
    std::shared_ptr<CopyJob> ended;
    {
      std::lock_guard guard(state_->lock);
      if (!status.ok()) fail_locked(std::move(status));
      if (drained) drain_locked();
      chunks_ += static_cast<uint32_t>(moved);
      threads_ += moved != 0;
      --inside_;
      if (phase_ != Phase::drained)
        state_->work.notify_one();  // this one leaves early: another goes on
      else if (inside_ == 0)
        ended = std::move(job_);
    }
    // One that left early and one that went on in its place were one at a time.
    if (ended) ended->end(std::move(status_), chunks_, std::min(threads_, max_threads_));
  }

  void fail_locked(Status status) {
    if (status_.ok()) status_ = std::move(status);  // the first failure is the cause
    next_.store(num_chunks_, std::memory_order_relaxed);
    drain_locked();
  }

  void drain_locked() {
    if (phase_ == Phase::drained) return;
    phase_ = Phase::drained;
    auto& queue = state_->queue;
    queue.erase(std::find(queue.begin(), queue.end(), shared_from_this()));
  }

  const std::shared_ptr<State> state_;
  std::shared_ptr<CopyJob> job_;
  const uint64_t bytes_, chunk_, num_chunks_;
  const uint32_t max_threads_;
  std::atomic<uint64_t> next_{0};
  // Under the state's lock.
  Phase phase_ = Phase::queued;
  uint32_t inside_ = 0, chunks_ = 0, threads_ = 0;
  Status status_;
};

void CopyPool::State::worker() {
  std::unique_lock guard(lock);
  while (true) {
    std::shared_ptr<Task> task;
    auto role = Task::Role::none;
    for (size_t i = 0; i < queue.size() && role == Task::Role::none; ++i) {
      role = queue[i]->join_locked();
      if (role != Task::Role::none) task = queue[i];
    }
    if (task) {
      guard.unlock();
      task->work(role, Time::max(), 0);
      task.reset();
      guard.lock();
    } else if (stopping) {
      return;
    } else {
      work.wait(guard);
    }
  }
}

CopyPool::CopyPool() : pid_(this_pid()), state_(std::make_shared<State>()) {}

CopyPool::~CopyPool() {
  {
    std::lock_guard guard(state_->lock);
    state_->stopping = true;
    state_->work.notify_all();
  }
  if (!is_this_process(pid_)) {  // a forked child has none of these threads: nothing to wait for, nothing to free
    (void)new std::vector<std::thread>(std::move(threads_));
    return;
  }
  // The last reference may be given up by a job's end, on one of these threads; that one leaves by itself.
  for (auto& thread : threads_) thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
}

std::shared_ptr<CopyPool> CopyPool::of_process() {
  struct Current {
    std::mutex lock;
    std::weak_ptr<CopyPool> pool;
  };
  auto& current = of_this_process<Current>();
  std::lock_guard guard(current.lock);
  auto pool = current.pool.lock();
  if (!pool) current.pool = pool = std::make_shared<CopyPool>();
  return pool;
}

void CopyPool::start_threads(uint32_t wanted) {
  std::lock_guard guard(threads_lock_);
  while (threads_.size() < wanted) {
    try {
      const auto name = "mr-copy-" + std::to_string(threads_.size());
      threads_.push_back(start_without_signals(name, [state = state_] { state->worker(); }));
    } catch (const Error&) {
      if (threads_.empty()) throw;  // fewer do it too
      return;
    }
  }
}

std::shared_ptr<OpHelper> CopyPool::submit(std::shared_ptr<CopyJob> job, uint64_t bytes, uint32_t max_threads,
                                           uint64_t max_chunk) {
  start_threads(max_threads);
  auto task = std::make_shared<Task>(state_, std::move(job), bytes, max_threads, max_chunk);
  {
    std::lock_guard guard(state_->lock);
    state_->queue.push_back(task);
  }
  state_->work.notify_one();  // without the lock: the woken thread wants it
  return task;
}

uint32_t copy_threads(const Options& options) {
  constexpr uint32_t kEnough = 4;
  return options.raw.copy_threads != 0 ? options.raw.copy_threads : std::min(kEnough, num_cores());
}

}  // namespace mr
