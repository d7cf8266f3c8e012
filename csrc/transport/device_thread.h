// The thread of an engine that talks to the GPU runtime: its calls may wait for the driver, and the loop never waits.
// It sleeps while nothing is under way; work on devices that is under way is asked about again and again, since a
// runtime wakes nobody when something fails.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace mr {

class DeviceThread {
 public:
  using Task = std::function<void()>;
  // Whether it is over; where the thread is ending, it is asked for the last time.
  using Poll = std::function<bool(bool ending)>;

  DeviceThread();  // the thread starts with the first task
  ~DeviceThread() { close(); }
  DeviceThread(const DeviceThread&) = delete;
  DeviceThread& operator=(const DeviceThread&) = delete;

  // Any thread, like all here. False, and the task is dropped, once it is closed, where there is no thread to be had,
  // and in a forked child. Tasks do not throw.
  bool run(Task task);
  bool poll(Poll poll);
  bool is_ours() const;  // not in a forked child of the process that made it
  void close();          // carries out what is queued, and joins; not from a task

 private:
  void thread_main();
  bool start_locked();

  const int pid_;
  std::mutex lock_;
  std::condition_variable wake_;
  std::deque<Task> tasks_;
  std::vector<Poll> arrived_;  // polls that the thread has not taken over yet
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace mr
