// Calls that a test holds up, as a kernel does that is short of processors or waits for something of its own.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <string>

namespace mr::test {

class FakeGates {
 public:
  // From now on calls of this name wait inside, before they do anything.
  void hold(const std::string& name) {
    std::lock_guard guard(lock_);
    held_.insert(name);
  }
  void let_go() {
    std::lock_guard guard(lock_);
    held_.clear();
    changed_.notify_all();
  }
  // Until so many calls are being held up.
  void await(size_t count) {
    std::unique_lock guard(lock_);
    changed_.wait(guard, [&] { return waiting_ >= count; });
  }
  void pass(const char* name) {
    std::unique_lock guard(lock_);
    if (held_.count(name) == 0) return;
    ++waiting_;
    changed_.notify_all();
    changed_.wait(guard, [&] { return held_.count(name) == 0; });
    --waiting_;
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  std::set<std::string> held_;
  size_t waiting_ = 0;
};

}  // namespace mr::test
