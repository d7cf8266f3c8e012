// What a link under test needs of its peer: a loop, regions, options, and the end of each operation counted.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "transport/lane.h"

namespace mr::test {

class TestHost : public LinkHost {
 public:
  // Runs task on the loop and returns when it has run.
  void on_loop(const Task& task) {
    std::atomic<bool> done{false};
    loop_.run([&] {
      task();
      done.store(true, std::memory_order_release);
      done.notify_all();
    });
    done.wait(false, std::memory_order_acquire);
  }
  // The kind of the operation's end.
  static int wait(const OpRef& op) {
    if (!op->wait(60)) throw std::runtime_error("an operation did not end: " + op->describe());
    return op->status().kind;
  }

  uint64_t counter(const std::string& name) {
    std::lock_guard guard(counters_lock_);
    return counters_[name];
  }
  // Waits for the counter to get there; true if it did.
  bool await_count(const std::string& name, uint64_t at_least) {
    std::unique_lock guard(counters_lock_);
    return counted_.wait_for(guard, std::chrono::seconds(60), [&] { return counters_[name] >= at_least; });
  }
  uint64_t begun() const { return begun_; }
  uint64_t ends() const { return ends_; }
  uint64_t doubled_ends() const { return doubled_ends_; }

  // LinkHost
  Loop& loop() override { return loop_; }
  RegionTable& regions() override { return regions_; }
  const Options& options() override { return options_; }
  const PeerInfo& info() override { return info_; }
  uint64_t session_id() override { return session_; }
  Digest session_key() override { return key_; }
  void heard_on_loop() override { count("heard", 1); }
  void on_done(const OpRef& op, Status status) override {
    op->link.reset();
    ++ends_;
    if (!op->finish(std::move(status))) ++doubled_ends_;
  }
  void submit_part(const OpRef& part) override { part->finish(fail(MR_CONFIG, "no parts in this test")); }
  void stop_part(const OpRef&, int) override {}
  void count(const char* name, uint64_t amount) override {
    std::lock_guard guard(counters_lock_);
    counters_[name] += amount;
    counted_.notify_all();
  }

 protected:
  TestHost(const std::string& name, const mr_options& options)
      : options_(Options::from(options)), loop_(name, [this] { regions_.life().give(); }) {
    random_bytes(key_.data(), key_.size());
  }
  ~TestHost() = default;

  const Options options_;
  RegionTable regions_;
  PeerInfo info_;  // of the other side
  uint64_t session_ = random_u64();
  Digest key_;
  std::atomic<uint64_t> begun_{0}, ends_{0}, doubled_ends_{0};

 private:
  std::mutex counters_lock_;
  std::condition_variable counted_;
  std::map<std::string, uint64_t> counters_;

 protected:
  Loop loop_;  // stopped by the destructor of the class below, before what it works on goes
};

}  // namespace mr::test
