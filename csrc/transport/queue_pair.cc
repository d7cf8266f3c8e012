#include "queue_pair.h"

#include <algorithm>
#include <new>

#include "../base/tls.h"

namespace mr {
namespace {

constexpr uint32_t kBatch = 32;
constexpr int kPoll = 16;            // completions taken at a time
constexpr double kDrainLimit = 0.1;  // seconds for what had completed to be taken before a queue pair is destroyed
constexpr uint32_t kPsnMask = 0xffffff;
constexpr uint32_t kHotAfter = 16;
constexpr uint64_t kIdleLooks = 3;
constexpr int kLooksPerClock = 64;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

ibv_mtu mtu_of(uint32_t bytes) {
  return bytes >= 4096   ? IBV_MTU_4096
         : bytes >= 2048 ? IBV_MTU_2048
         : bytes >= 1024 ? IBV_MTU_1024
         : bytes >= 512  ? IBV_MTU_512
                         : IBV_MTU_256;
}

}  // namespace

// Requests that ended, on the way from the ring to the sink.
class QueuePair::Ended {
 public:
  ~Ended() { clear(); }
  bool full() const { return count_ == kPoll; }
  size_t count() const { return count_; }
  void add(Work&& work) { new (&reinterpret_cast<Work*>(room_)[count_++]) Work(std::move(work)); }
  std::span<Work> all() { return {std::launder(reinterpret_cast<Work*>(room_)), count_}; }
  void clear() {
    for (Work& work : all()) work.~Work();
    count_ = 0;
  }

 private:
  alignas(Work) std::byte room_[kPoll * sizeof(Work)];
  size_t count_ = 0;
};

// ---- From RESET to RTS, and to its end ----

QueuePair::QueuePair(ProtectionDomainRef domain, CompletionChannelRef channel, uint64_t id, std::weak_ptr<Sink> sink,
                     const QueuePairLimits& limits, const QueuePairPath& path, int remote_access)
    : id_(id),
      limits_(limits),
      psn_(static_cast<uint32_t>(random_u64()) & kPsnMask),
      domain_(std::move(domain)),
      channel_(std::move(channel)),
      verbs_(domain_->verbs()),
      sink_(std::move(sink)) {
  const ibv_device_attr& device = domain_->context()->attributes();
  limits_.depth = std::min<uint32_t>(limits_.depth, static_cast<uint32_t>(std::max(1, device.max_qp_wr)));
  limits_.depth = std::min<uint32_t>(limits_.depth, static_cast<uint32_t>(std::max(1, device.max_cqe)));
  limits_.max_sge = std::min<uint32_t>(limits_.max_sge, static_cast<uint32_t>(std::max(1, device.max_sge)));
  limits_.rd_atomic = std::min<uint32_t>(limits_.rd_atomic, static_cast<uint32_t>(device.max_qp_init_rd_atom));
  limits_.responder = std::min<uint32_t>(limits_.responder, static_cast<uint32_t>(device.max_qp_rd_atom));
  cq_ = std::make_unique<CompletionQueue>(channel_, static_cast<int>(limits_.depth), reinterpret_cast<void*>(id_));
  create(path, remote_access);
  slots_ = std::make_unique<Work[]>(limits_.depth);
  batch_.resize(kBatch);
  sges_.resize(kBatch * limits_.max_sge);
}

QueuePair::~QueuePair() { (void)destroy(); }

void QueuePair::create(const QueuePairPath& path, int remote_access) {
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = cq_->get();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = limits_.depth;
  wanted.cap.max_recv_wr = 1;
  wanted.cap.max_send_sge = limits_.max_sge;
  wanted.cap.max_recv_sge = 1;
  // What can be inlined depends on things that no attribute tells: ask for less until it is granted.
  for (wanted.cap.max_inline_data = limits_.max_inline;; wanted.cap.max_inline_data /= 2) {
    ibv_qp_init_attr attr = wanted;
    qp_ = verbs_.create_qp(domain_->get(), &attr);
    if (qp_ != nullptr) {
      limits_.max_inline = std::min(limits_.max_inline, attr.cap.max_inline_data);
      break;
    }
    const int error = errno;
    if (wanted.cap.max_inline_data == 0)
      throw Error(verbs_failure(MR_RESOURCE_EXHAUSTED, "ibv_create_qp",
                                std::to_string(limits_.depth) + " requests of " + std::to_string(limits_.max_sge) +
                                    " pieces at " + domain_->context()->name(),
                                error));
  }
  number_ = qp_->qp_num;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.pkey_index = path.pkey_index;
  attr.port_num = path.port;
  attr.qp_access_flags = static_cast<unsigned>(remote_access);
  try {
    modify(attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
  } catch (const Error&) {
    (void)destroy();
    throw;
  }
}

void QueuePair::modify(ibv_qp_attr& attr, int mask, const char* to) {
  if (const int error = verbs_.modify_qp(qp_, &attr, mask); error != 0)
    throw Error(verbs_failure(MR_CONFIG, "ibv_modify_qp", "a queue pair of " + domain_->context()->name() + " to " + to,
                              error));
}

void QueuePair::connect(const QueuePairPath& path, const QueuePairEnd& theirs, uint32_t rd_atomic) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = mtu_of(path.mtu);
  attr.dest_qp_num = theirs.number;
  attr.rq_psn = theirs.psn;
  attr.max_dest_rd_atomic = static_cast<uint8_t>(limits_.responder);
  attr.min_rnr_timer = path.rnr_timer;
  attr.ah_attr.dlid = path.lid;
  attr.ah_attr.sl = path.service_level;
  attr.ah_attr.port_num = path.port;
  attr.ah_attr.is_global = path.global;
  if (path.global) {
    attr.ah_attr.grh.dgid = path.gid;
    attr.ah_attr.grh.sgid_index = path.gid_index;
    attr.ah_attr.grh.hop_limit = path.hop_limit;
    attr.ah_attr.grh.traffic_class = path.traffic_class;
  }
  modify(attr,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER,
         "RTR");
  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = path.timeout;
  attr.retry_cnt = path.retries;
  attr.rnr_retry = path.rnr_retries;
  attr.sq_psn = psn_;
  attr.max_rd_atomic = static_cast<uint8_t>(std::min(limits_.rd_atomic, rd_atomic));
  modify(attr,
         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
         "RTS");
}

// What ends the card's access to the memory of requests is that it tells their end: in ERR it ends all of them. The
// destruction ends it too, for those whose end is never told, but the kernel may sit on it.
bool QueuePair::shut() {
  broken_.store(true);
  {
    std::lock_guard guard(post_lock_);
    if (std::exchange(shut_, true)) return is_destroyed_.load();
  }
  shutting_.store(true);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_ERR;
  // Where it fails the device may be gone.
  const bool flushes = qp_ != nullptr && verbs_.modify_qp(qp_, &attr, IBV_QP_STATE) == 0;
  const Time limit = after(kDrainLimit);
  do drain(true);
  while (flushes && !is_quiet() && Clock::now() < limit);
  if (!is_quiet()) await_event(true);
  const bool gone = destroy();
  is_destroyed_.store(gone);
  if (gone) returned_until_.store(~0ull);
  tell_quiet();
  return gone;
}

// Others may poll meanwhile: what they find may be what makes it quiet.
bool QueuePair::destroy() {
  if (qp_ == nullptr || !domain_->context()->is_ours()) return true;
  const bool gone = has_ended(verbs_.destroy_qp(std::exchange(qp_, nullptr)));
  std::unique_ptr<CompletionQueue> unused;
  std::lock_guard guard(poll_lock_);
  unused = std::move(cq_);
  return gone;
}

void QueuePair::tell_quiet() {
  if (!shutting_.load(std::memory_order_relaxed) || !is_quiet() || told_quiet_.exchange(true)) return;
  if (const auto sink = sink_.lock()) sink->on_quiet(*this);
}

template <typename Look>
void QueuePair::look_at_unfinished(Look look) {
  std::lock_guard guard(poll_lock_);
  const uint64_t end = head_.load();
  for (uint64_t i = tail_.load(); i < end; ++i) look(slots_[i % limits_.depth]);
}

std::vector<std::shared_ptr<const Registration>> QueuePair::local_in_use() {
  std::vector<std::shared_ptr<const Registration>> out;
  look_at_unfinished([&](const Work& work) {
    if (work.local && std::find(out.begin(), out.end(), work.local) == out.end()) out.push_back(work.local);
  });
  return out;
}

Time QueuePair::first_deadline() {
  Time first = Time::max();
  look_at_unfinished([&](const Work& work) {
    const Time late = Time::max() - Clock::duration(1);
    if (work.op) first = std::min({first, late, work.op->stopping() ? Time::min() : work.op->deadline});
  });
  return first;
}

void QueuePair::stop_small(int kind) {
  look_at_unfinished([&](const Work& work) {
    int none = 0;
    if (work.op) work.op->stop_kind.compare_exchange_strong(none, kind);
  });
}

std::vector<Work> QueuePair::take_unfinished(uint64_t* first) {
  std::lock_guard guard(poll_lock_);
  const uint64_t end = head_.load();
  *first = tail_.load();
  std::vector<Work> out;
  for (uint64_t i = *first; i < end; ++i) out.push_back(std::move(slots_[i % limits_.depth]));
  tail_.store(end);
  return out;
}

// ---- Requests go in ----

QueuePair::Batch::Batch(QueuePair& pair, bool wait)
    : pair_(pair), begun_(wait ? (pair.post_lock_.lock(), true) : pair.post_lock_.try_lock()) {}

// The sink hears of a failure when the lock is free again: it may want to post elsewhere, or look here.
QueuePair::Batch::~Batch() {
  if (!begun_) return;
  post();
  pair_.post_lock_.unlock();
  pair_.tell_broken();
}

bool QueuePair::Batch::has_room() const {
  return begun_ && !pair_.shut_ && !pair_.broken_.load(std::memory_order_relaxed) && pair_.num_batched_ < kBatch &&
         pair_.outstanding() + pair_.num_batched_ < pair_.limits_.depth;
}

ibv_send_wr& QueuePair::Batch::append(Work&& work, ibv_wr_opcode opcode, std::span<const ibv_sge> sges) {
  QueuePair& pair = pair_;
  const uint64_t sequence = pair.head_.load(std::memory_order_relaxed) + pair.num_batched_;
  ibv_send_wr& wr = pair.batch_[pair.num_batched_];
  ibv_sge* const list = &pair.sges_[pair.num_batched_ * pair.limits_.max_sge];
  std::copy(sges.begin(), sges.end(), list);
  wr.wr_id = sequence;
  wr.next = nullptr;
  wr.sg_list = list;
  wr.num_sge = static_cast<int>(sges.size());
  wr.opcode = opcode;
  wr.send_flags = work.op ? unsigned{IBV_SEND_SIGNALED} : 0u;  // somebody waits for just this one
  if (pair.num_batched_ > 0) pair.batch_[pair.num_batched_ - 1].next = &wr;
  pair.slots_[sequence % pair.limits_.depth] = std::move(work);
  ++pair.num_batched_;
  return wr;
}

void QueuePair::Batch::add(Work&& work, ibv_wr_opcode opcode, std::span<const ibv_sge> sges, uint64_t remote,
                           uint32_t rkey, bool inlined) {
  ibv_send_wr& wr = append(std::move(work), opcode, sges);
  wr.wr.rdma.remote_addr = remote;
  wr.wr.rdma.rkey = rkey;
  if (inlined) wr.send_flags |= IBV_SEND_INLINE;
}

void QueuePair::Batch::add_atomic(Work&& work, ibv_wr_opcode opcode, const ibv_sge& result, uint64_t remote,
                                  uint32_t rkey, uint64_t a, uint64_t b) {
  ibv_send_wr& wr = append(std::move(work), opcode, {&result, 1});
  wr.wr.atomic.remote_addr = remote;
  wr.wr.atomic.rkey = rkey;
  wr.wr.atomic.compare_add = a;
  wr.wr.atomic.swap = b;
}

// The head moves and the event is asked for before the requests leave: whoever polls in between finds them owed, and a
// completion can't come before there is somebody to wake. A request that could not be posted stays in the ring, as one
// whose end is not known; the pair is broken then.
void QueuePair::Batch::post() {
  QueuePair& pair = pair_;
  if (!begun_ || pair.num_batched_ == 0) return;
  pair.batch_[pair.num_batched_ - 1].send_flags |= IBV_SEND_SIGNALED;
  const uint64_t first = pair.head_.load(std::memory_order_relaxed);
  pair.head_.store(first + std::exchange(pair.num_batched_, 0));
  const auto fail_from = [&pair](uint64_t unposted, const char* call, int error) {
    pair.posted_until_.store(unposted);
    pair.fail_once({IBV_WC_SUCCESS, 0, 0, verbs_failure(MR_PEER_LOST, call, pair.domain_->context()->name(), error)});
  };
  if (const int error = pair.arm(); error != 0) return fail_from(first, "ibv_req_notify_cq", error);
  ibv_send_wr* bad = pair.batch_.data();
  if (const int error = pair.verbs_.post_send(pair.qp_, bad, &bad); error != 0)
    fail_from(bad->wr_id, "ibv_post_send", error);
}

int QueuePair::arm() {
  if (hot_.load() || armed_.load() || armed_.exchange(true)) return 0;
  return verbs_.req_notify_cq(cq_->get(), 0);
}

// ---- Ends come out ----

void QueuePair::on_completion(const ibv_wc& wc) {
  // Of a failed completion only the id, the status, the vendor's error and the queue pair's number mean anything.
  const bool ours = wc.wr_id >= tail_.load(std::memory_order_relaxed) && wc.wr_id < head_.load();
  if (!ours) return;
  const uint64_t returned = std::max(returned_until_.load(std::memory_order_relaxed), wc.wr_id + 1);
  returned_until_.store(returned, std::memory_order_release);  // who shuts the pair polls under the same lock
  if (wc.status == IBV_WC_SUCCESS) {
    known_until_ = std::max(known_until_, wc.wr_id + 1);
    return;
  }
  if (std::exchange(failed_, true)) return;
  known_until_ = std::max(known_until_, wc.wr_id);  // those before the first that failed have succeeded
  fail_once({wc.status, wc.vendor_err, wc.wr_id,
             fail(MR_PEER_LOST, std::string(completion_text(wc.status)) + " (status " + std::to_string(wc.status) +
                                    ", vendor error " + std::to_string(wc.vendor_err) + ")")});
}

// A queue that gives less than was asked for is empty.
void QueuePair::collect(Ended& ended) {
  for (bool may_be_more = true; !ended.full();) {
    const uint64_t next = tail_.load(std::memory_order_relaxed);
    if (next < known_until_) {
      ended.add(std::move(slots_[next % limits_.depth]));
      tail_.store(next + 1);
      continue;
    }
    if (!may_be_more) return;
    ibv_wc completions[kPoll];
    const int count = cq_ ? verbs_.poll_cq(cq_->get(), kPoll, completions) : 0;
    if (count < 0)
      fail_once({IBV_WC_SUCCESS, 0, 0, fail(MR_PEER_LOST, "ibv_poll_cq failed at " + domain_->context()->name())});
    may_be_more = count == kPoll;
    for (int i = 0; i < count; ++i) on_completion(completions[i]);
  }
}

size_t QueuePair::drain(bool wait) {
  Ended ended;
  size_t total = 0;
  while (true) {
    {
      std::unique_lock guard(poll_lock_, std::defer_lock);
      if (wait)
        guard.lock();
      else if (!guard.try_lock())
        return total;
      collect(ended);
    }
    if (ended.count() > 0) {
      total += ended.count();
      if (const auto sink = sink_.lock()) sink->on_done(*this, ended.all());
    }
    tell();
    if (!ended.full()) return total;
    ended.clear();
  }
}

void QueuePair::fail_once(QueuePairFailure failure) {
  {
    std::lock_guard guard(failure_lock_);
    // The first completion with an error tells more than what made us look for it.
    if (!failure_.why.ok() && (failure_.status != IBV_WC_SUCCESS || failure.status == IBV_WC_SUCCESS)) return;
    if (!failure_.why.ok() && failure.status == IBV_WC_WR_FLUSH_ERR) failure.why = failure_.why;
    failure_ = std::move(failure);
  }
  broken_.store(true);
}

void QueuePair::tell_broken() {
  if (!broken_.load(std::memory_order_relaxed) || told_.load(std::memory_order_relaxed)) return;
  if (failure().why.ok() || told_.exchange(true)) return;
  if (const auto sink = sink_.lock()) sink->on_broken(*this);
}

void QueuePair::give_up(Status why) {
  fail_once({IBV_WC_SUCCESS, 0, 0, std::move(why)});
  tell_broken();
}

QueuePairFailure QueuePair::failure() {
  std::lock_guard guard(failure_lock_);
  return failure_;
}

bool QueuePair::on_event() {
  armed_.store(false);
  if (drain(true) > 0 && helpers_.load() == 0) helped_.store(0);
  const Time limit = after(limits_.spin);
  while (helpers_.load() == 0 && outstanding() > 0 && !is_broken() && Clock::now() < limit)
    if (drain(false) == 0) relax();
  if (helped_.load() >= kHotAfter && !hot_.exchange(true)) {
    seen_head_ = head_.load();
    idle_looks_ = 0;
    return true;
  }
  await_event();
  return false;
}

void QueuePair::await_event(bool once_more) {
  if (outstanding() == 0) return;
  int error = 0;
  {
    std::lock_guard guard(poll_lock_);
    if (once_more) hot_.store(false), armed_.store(false);
    if (cq_) error = arm();
  }
  if (error != 0) return give_up(verbs_failure(MR_PEER_LOST, "ibv_req_notify_cq", domain_->context()->name(), error));
  drain(true);
}

// Whoever posts moves the head before it looks at hot_: either it asks for an event, or we see the request.
void QueuePair::cool_down() {
  helped_.store(0);
  hot_.store(false);
  await_event();
}

bool QueuePair::look_in() {
  const uint64_t head = head_.load(), tail = tail_.load();
  const bool nobody_polls = head != tail && tail == std::exchange(seen_tail_, tail) && helpers_.load() == 0;
  idle_looks_ = head == std::exchange(seen_head_, head) ? idle_looks_ + 1 : 0;
  if (!nobody_polls && idle_looks_ < kIdleLooks && !is_broken()) return true;
  cool_down();
  return false;
}

void QueuePair::help(const mr_op& op, Time until) {
  if (until == Time::min()) return;
  helpers_.fetch_add(1);
  // A look at the clock costs as much as several at the queue. A pause would too: in a virtual machine it can be an
  // exit to the host, of microseconds.
  for (Time limit = Time::max();;) {
    for (int i = 0; i < kLooksPerClock && !op.done(); ++i) drain(false);
    if (op.done() || is_broken() || (op.has_notify && outstanding() == 0)) break;  // what is left is the loop's
    const Time now = Clock::now();
    if (limit == Time::max())
      limit = std::min(until,
                       now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limits_.spin)));
    if (now >= limit) break;
  }
  if (op.done() && helped_.load(std::memory_order_relaxed) < kHotAfter) helped_.fetch_add(1);
  helpers_.fetch_sub(1);
  // Who sleeps now is woken by the poller.
  if (!op.done() && outstanding() > 0) expect_events();
}

}  // namespace mr
