#include "worker.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

#include "error.h"
#include "fd.h"

namespace mr {

std::thread start_without_signals(const std::string& name, std::function<void()> body) {
  sigset_t blocked, before;
  ::sigfillset(&blocked);
  for (int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) ::sigdelset(&blocked, crash);
  ::pthread_sigmask(SIG_SETMASK, &blocked, &before);
  std::thread thread;
  int failure = 0;
  try {
    thread = std::thread(std::move(body));
    ::pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  } catch (const std::system_error& error) {
    failure = error.code().value();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure != 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "can't start the thread " + name + " (raise `ulimit -u`)", failure);
  return thread;
}

Worker::Worker(std::string thread_name) : name_(std::move(thread_name)), pid_(this_pid()) {}

bool Worker::run(std::function<void()> task) {
  if (!is_this_process(pid_)) return false;
  std::lock_guard guard(lock_);
  if (closed_) return false;
  if (!thread_.joinable()) {
    try {
      thread_ = start_without_signals(name_, [this] { thread_main(); });
    } catch (const Error&) {
      return false;
    }
  }
  tasks_.push_back(std::move(task));
  wake_.notify_one();
  return true;
}

void Worker::close() {
  if (!is_this_process(pid_)) {
    // The thread stayed behind in the parent: to join it would wait for ever, to destroy its handle ends the process.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard guard(lock_);
    closed_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Worker::thread_main() {
  std::unique_lock guard(lock_);
  while (true) {
    wake_.wait(guard, [this] { return closed_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    guard.unlock();
    task();
    task = nullptr;  // what it holds goes before the next one begins
    guard.lock();
  }
}

}  // namespace mr
