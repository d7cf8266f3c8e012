#include "device_thread.h"

#include <algorithm>
#include <chrono>

#include "../base/error.h"
#include "../base/fd.h"
#include "../base/thread.h"

namespace mr {
namespace {

// A copy of a megabyte takes 50 us; work of others that a copy waits for may take seconds.
constexpr auto kSoon = std::chrono::microseconds(20), kLate = std::chrono::microseconds(1000);

}  // namespace

DeviceThread::DeviceThread() : pid_(this_pid()) {}

bool DeviceThread::is_ours() const { return is_this_process(pid_); }

bool DeviceThread::start_locked() {
  if (closed_) return false;
  if (thread_.joinable()) return true;
  try {
    thread_ = start_without_signals("mr-gpu", [this] { thread_main(); });
  } catch (const Error&) {
    return false;
  }
  return true;
}

bool DeviceThread::run(Task task) {
  if (!is_this_process(pid_)) return false;
  std::lock_guard guard(lock_);
  if (!start_locked()) return false;
  tasks_.push_back(std::move(task));
  wake_.notify_one();
  return true;
}

bool DeviceThread::poll(Poll poll) {
  if (!is_this_process(pid_)) return false;
  std::lock_guard guard(lock_);
  if (!start_locked()) return false;
  arrived_.push_back(std::move(poll));
  wake_.notify_one();
  return true;
}

void DeviceThread::close() {
  if (!is_this_process(pid_)) {
    if (thread_.joinable()) thread_.detach();  // it stayed behind in the parent
    return;
  }
  {
    std::lock_guard guard(lock_);
    closed_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void DeviceThread::thread_main() {
  std::vector<Poll> polls;
  auto pause = kSoon;
  std::unique_lock guard(lock_);
  while (true) {
    const auto has_news = [this] { return closed_ || !tasks_.empty() || !arrived_.empty(); };
    if (polls.empty())
      wake_.wait(guard, has_news);
    else if (!wake_.wait_for(guard, pause, has_news))
      pause = std::min(pause * 2, kLate);
    const auto tasks = std::exchange(tasks_, {});
    auto arrived = std::exchange(arrived_, {});
    const bool ending = closed_ && tasks.empty();
    guard.unlock();
    if (!tasks.empty() || !arrived.empty()) pause = kSoon;
    for (const Task& task : tasks) task();
    std::move(arrived.begin(), arrived.end(), std::back_inserter(polls));
    const auto over = [&](const Poll& poll) { return poll(ending); };
    if (std::erase_if(polls, over) != 0) pause = kSoon;
    guard.lock();
    if (ending) return;
  }
}

}  // namespace mr
