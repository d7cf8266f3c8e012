// One reliable-connected queue pair with a completion queue of its own: work requests go in from any thread, their ends
// come out exactly once, in order. It knows no policy; what a request is for, and what follows from its end, is told by
// whoever posts (Work) and hears (Sink).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "../base/light_lock.h"
#include "op.h"
#include "verbs.h"

namespace mr {

class QueuePair;
class Registration;
class StagingBlocks;

// What one work request is for; kept until its end is known.
struct Work {
  OpRef op;                                   // all of a small operation
  std::shared_ptr<void> owner;                // what `op` or a larger operation needs kept alive
  std::shared_ptr<const Registration> local;  // of the local memory
  std::shared_ptr<StagingBlocks> staging;     // whose block the local bytes go through
  uint8_t* staged = nullptr;                  // the block
  uint64_t begin = 0, length = 0;             // which bytes of the operation
  uint32_t kind = 0;                          // the poster's
};

struct QueuePairLimits {
  uint32_t depth = 128;  // work requests at a time
  uint32_t max_sge = 16, max_inline = 0;
  uint32_t rd_atomic = 16;  // reads and atomics at a time that we begin
  uint32_t responder = 16;  // that the other side may begin
  double spin = 0;          // how long a thread polls before it sleeps, seconds
};

// One end of a connection, as the other end must know it.
struct QueuePairEnd {
  uint32_t number = 0, psn = 0;
};

// The way to the other end, and the attributes of the transitions to RTR and RTS.
struct QueuePairPath {
  uint8_t port = 1, gid_index = 0, hop_limit = 64, traffic_class = 0, service_level = 0;
  bool global = false;  // packets have a GRH
  ibv_gid gid{};        // theirs
  uint16_t lid = 0;     // theirs
  uint32_t mtu = 1024;  // bytes
  uint8_t timeout = 14, retries = 7, rnr_retries = 7, rnr_timer = 12;
  uint16_t pkey_index = 0;
};

// Why a queue pair is of no use any more: the first cause.
struct QueuePairFailure {
  ibv_wc_status status = IBV_WC_SUCCESS;  // of the request `sequence`, where a completion told
  uint32_t vendor_error = 0;
  uint64_t sequence = 0;
  Status why;
};

class QueuePair : public OpHelper, public std::enable_shared_from_this<QueuePair> {
 public:
  class Sink {
   public:
    // Any thread, outside of all locks of the pair.
    virtual void on_done(QueuePair& pair, std::span<Work> done) = 0;
    virtual void on_broken(QueuePair& pair) = 0;  // once
    // Once, after shut has begun: the card has ended all requests, and touches no memory for the pair any more.
    virtual void on_quiet(QueuePair& pair) = 0;

   protected:
    ~Sink() = default;
  };

  // In state INIT, for `remote_access` of the other side. Throws MR_RESOURCE_EXHAUSTED or MR_CONFIG. `limits` are
  // lowered to what the device grants. The sink may be null for an end that only serves.
  QueuePair(ProtectionDomainRef domain, CompletionChannelRef channel, uint64_t id, std::weak_ptr<Sink> sink,
            const QueuePairLimits& limits, const QueuePairPath& path, int remote_access);
  ~QueuePair();

  // To RTR and RTS, with at most `rd_atomic` reads and atomics at a time. Throws MR_CONFIG.
  void connect(const QueuePairPath& path, const QueuePairEnd& theirs, uint32_t rd_atomic = 255);
  QueuePairEnd ours() const { return {number_, psn_}; }
  uint32_t number() const { return number_; }
  const QueuePairLimits& limits() const { return limits_; }
  uint64_t id() const { return id_; }

  // One thread at a time collects requests and rings the doorbell once for all of them.
  class Batch {
   public:
    Batch(QueuePair& pair, bool wait);  // !wait: does not begin where another thread is at it
    ~Batch();
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    bool has_room() const;  // for one more request
    // `opcode` from `sges` (at most max_sge; inlined where `inlined`) at the remote address.
    void add(Work&& work, ibv_wr_opcode opcode, std::span<const ibv_sge> sges, uint64_t remote, uint32_t rkey,
             bool inlined = false);
    void add_atomic(Work&& work, ibv_wr_opcode opcode, const ibv_sge& result, uint64_t remote, uint32_t rkey,
                    uint64_t a, uint64_t b);
    void post();  // also done by the destructor

   private:
    ibv_send_wr& append(Work&& work, ibv_wr_opcode opcode, std::span<const ibv_sge> sges);

    QueuePair& pair_;
    const bool begun_;
  };

  // Takes what has completed and tells the sink; how many requests ended. !wait: nothing where another thread is at it.
  size_t drain(bool wait);
  // For the poller: a completion event arrived. Polls, and asks for the next event where requests are still out. True:
  // whoever posts also waits and polls by itself, so no more events are asked for, and the poller looks in now and
  // then.
  bool on_event();
  // The poller looks in: false once it need not come again, because events are asked for as before.
  bool look_in();
  // For who posts and does not poll: the poller is to be told of completions by events.
  void expect_events() {
    if (hot_.load()) cool_down();
  }
  uint64_t num_posted() const { return head_.load(); }  // ever
  uint64_t outstanding() const { return head_.load() - tail_.load(); }
  bool is_broken() const { return broken_.load(); }
  // Marks it broken from outside; the sink hears of it unless it was broken before.
  void give_up(Status why);
  QueuePairFailure failure();

  // To ERR, takes what had completed, and destroys queue pair and completion queue. True: they are gone. The kernel may
  // take as long as it likes for it; the sink hears of it (on_quiet) as soon as the card has told the end of every
  // request, which is before that as a rule. Not inside of a sink's call.
  bool shut();
  // Of one that is quiet, or whose memory was taken from the card: the requests whose end is not known, in order, and
  // the sequence number of the first.
  std::vector<Work> take_unfinished(uint64_t* first);
  // The local memory of the requests whose end is not known, each once.
  std::vector<std::shared_ptr<const Registration>> local_in_use();
  // Of the small operations whose end is not known: the first deadline; Time::min() where one is to stop, Time::max()
  // where there are none.
  Time first_deadline();
  void stop_small(int kind);  // marks them

  // OpHelper
  void help(const mr_op& op, Time until) override;

 private:
  class Ended;
  void create(const QueuePairPath& path, int remote_access);
  bool destroy();
  bool is_quiet() const { return returned_until_.load() >= std::min(head_.load(), posted_until_.load()); }
  void tell_quiet();
  // What a failure or shutting it has left to tell; one that is shut is broken, too.
  void tell() {
    if (!broken_.load(std::memory_order_relaxed)) return;
    tell_broken();
    tell_quiet();
  }
  template <typename Look>
  void look_at_unfinished(Look look);
  int arm();
  void await_event(bool once_more = false);  // once_more: even if one is asked for
  void cool_down();
  void collect(Ended& ended);
  void on_completion(const ibv_wc& wc);
  void fail_once(QueuePairFailure failure);
  void tell_broken();
  void modify(ibv_qp_attr& attr, int mask, const char* to);

  const uint64_t id_;
  QueuePairLimits limits_;
  const uint32_t psn_;
  uint32_t number_ = 0;
  const ProtectionDomainRef domain_;
  const CompletionChannelRef channel_;
  const Verbs& verbs_;
  std::unique_ptr<CompletionQueue> cq_;  // under poll_lock_
  ibv_qp* qp_ = nullptr;                 // under post_lock_, constant until it is shut

  std::unique_ptr<Work[]> slots_;  // by sequence number modulo depth
  std::atomic<uint64_t> head_{0};  // the next request's sequence number
  std::atomic<uint64_t> tail_{0};  // of the oldest whose end is not known
  // All before it have left the card, as a completion told, be it one of a failure: they come in order.
  std::atomic<uint64_t> returned_until_{0};
  std::atomic<uint64_t> posted_until_{~0ull};  // where posting failed: those from here on never reached the card
  std::atomic<bool> armed_{false};
  std::atomic<bool> broken_{false};
  std::atomic<bool> told_{false};  // the sink, that it is broken
  std::atomic<bool> shutting_{false}, told_quiet_{false}, is_destroyed_{false};
  std::atomic<int> helpers_{0};                              // threads that poll while they wait
  std::atomic<uint32_t> helped_{0};                          // requests in a row whose ends their waiters found
  std::atomic<bool> hot_{false};                             // no events are asked for
  uint64_t seen_head_ = 0, seen_tail_ = 0, idle_looks_ = 0;  // the poller's

  LightLock post_lock_;
  bool shut_ = false;
  uint32_t num_batched_ = 0;
  std::vector<ibv_send_wr> batch_;
  std::vector<ibv_sge> sges_;

  LightLock poll_lock_;
  uint64_t known_until_ = 0;  // all requests before it have succeeded
  bool failed_ = false;       // a completion told of a failure: all that follow do

  std::mutex failure_lock_;
  QueuePairFailure failure_;
  const std::weak_ptr<Sink> sink_;
};
using QueuePairRef = std::shared_ptr<QueuePair>;

}  // namespace mr
