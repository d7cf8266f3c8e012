// A thread that carries out tasks one after the other: for calls that may take long, like those that pin memory.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace mr {

class Worker {
 public:
  explicit Worker(std::string thread_name);  // the thread starts with the first task
  ~Worker() { close(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Any thread. False, and the task is dropped, once it is closed, where there is no thread to be had, and in a forked
  // child. Tasks do not throw.
  bool run(std::function<void()> task);
  // Carries out what is queued, and joins. Not from a task.
  void close();

 private:
  void thread_main();

  const std::string name_;
  const int pid_;
  std::mutex lock_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
  std::thread thread_;
};

// Starts a thread that no signal of the program is delivered to, crashes apart. Throws MR_RESOURCE_EXHAUSTED.
std::thread start_without_signals(const std::string& name, std::function<void()> body);

}  // namespace mr
