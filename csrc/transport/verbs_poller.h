// One thread a card: sleeps until a completion or an event of the card itself arrives, and tells whom it concerns.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "../base/fd.h"
#include "queue_pair.h"

namespace mr {

class VerbsPoller {
 public:
  using OnCardEvent = std::function<void(const ibv_async_event&)>;

  // Throws MR_RESOURCE_EXHAUSTED. on_event is called on the poller's thread. watch_node: the card's driver tells nobody
  // that the device is being removed, and waits for those who have it open: its file in /dev tells.
  VerbsPoller(VerbsContextRef context, OnCardEvent on_event, bool watch_node = false);
  ~VerbsPoller() { close(); }
  VerbsPoller(const VerbsPoller&) = delete;
  VerbsPoller& operator=(const VerbsPoller&) = delete;

  const CompletionChannelRef& channel() const { return channel_; }
  // Completion events are for queue pairs by id: those whose id is not known (any more) are acknowledged and dropped.
  uint64_t new_id();
  void add(const QueuePairRef& pair);
  void remove(uint64_t id);
  void close();  // joins; not from the thread itself

 private:
  void thread_main();
  void watch_node();
  void take_node_events();
  void tell_gone(int fd);
  void unwatch_if_gone(int fd);
  void take_completion_events();
  void look_in();
  void take_card_events();
  void watch(int fd);

  const VerbsContextRef context_;
  const OnCardEvent on_event_;
  const CompletionChannelRef channel_;
  const int pid_;
  Fd epoll_, stop_, node_;
  std::mutex lock_;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, std::weak_ptr<QueuePair>> pairs_;
  std::vector<std::weak_ptr<QueuePair>> watched_;  // those that ask for no events; the thread's
  std::thread thread_;
};

}  // namespace mr
