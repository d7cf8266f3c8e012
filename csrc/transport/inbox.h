// Messages that have arrived, in batches. One receiver at a time has the turn: the batch it took is its own until it
// takes again or gives the turn back, so that messages are dealt with in the order in which they came.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../base/loop.h"
#include "../base/wire.h"

namespace mr {

class Peer;

// What one connection's other end has sent and nobody has read. Shared with the batches that the messages lie in.
class Intake : public std::enable_shared_from_this<Intake> {
 public:
  Intake(std::weak_ptr<Peer> peer, uint64_t window) : peer_(std::move(peer)), window_(window) {}
  void arrived(uint64_t bytes);  // throws MR_PROTOCOL past the window
  void read(uint64_t bytes);     // any thread, without locks that tasks of the loop take
  uint64_t take_credit() { return credit_.exchange(0); }

 private:
  const std::weak_ptr<Peer> peer_;
  const uint64_t window_;
  std::atomic<uint64_t> unread_{0}, credit_{0};
};

struct Batch {
  Bytes bytes;                                                     // entries: mr_incoming, sender, data
  uint64_t count = 0;                                              // of entries
  std::vector<std::pair<std::shared_ptr<Intake>, uint64_t>> from;  // bytes of the window that reading it frees

  void settle() const;
};

class Inbox {
 public:
  class Stop;

  explicit Inbox(std::shared_ptr<Loop> loop) : loop_(std::move(loop)) {}

  void add_on_loop(const std::shared_ptr<Intake>& from, std::string_view sender, ByteView head, ByteView body);
  // A watched peer is lost.
  void add_notice_on_loop(std::string_view sender, const Status& why);

  // The next batch, valid until this thread's next take or done; null at the timeout, when stopped or closed.
  const Batch* take(double timeout, Stop* stop, bool background);
  // Gives the turn back. put_back: nobody has read the batch, the next receiver gets it.
  void done(bool put_back);
  // All of it, whoever has the turn; for a handler that takes over.
  std::deque<std::unique_ptr<Batch>> empty();
  void close();

 private:
  struct Waiter;

  Batch& batch_for(uint64_t bytes);
  void put_locked(int kind, std::string_view sender, ByteView head, ByteView body);
  const Batch* next_locked();
  std::unique_ptr<Batch> give_up_turn_locked();
  void wait_locked(std::unique_lock<std::mutex>& guard, Waiter& me, Time until);
  void hand_over_locked();
  bool leaves_lead_locked(const Waiter& me);
  void refresh_locked() { ready_ = !batches_.empty() && owner_ == std::thread::id{}; }
  void look_again(Waiter& waiter);

  const std::shared_ptr<Loop> loop_;
  std::mutex lock_;
  std::deque<std::unique_ptr<Batch>> batches_;
  std::unique_ptr<Batch> current_, spare_;  // spare_: kept for its memory
  std::thread::id owner_;                   // who has the turn
  std::vector<Waiter*> waiters_;
  std::atomic<bool> ready_{false};  // there are messages, and nobody has the turn
  std::atomic<bool> closed_{false};
};

// Ends takes early, from any thread of the process that made it.
class Inbox::Stop {
 public:
  void set();
  void clear() { set_ = false; }
  bool is_set() const { return set_.load(); }
  bool is_ours() const { return is_this_process(pid_); }

 private:
  friend class Inbox;
  const int pid_ = this_pid();
  std::atomic<bool> set_{false};
  std::mutex lock_;  // before an inbox's
  std::vector<Waiter*> waiters_;
};

}  // namespace mr
