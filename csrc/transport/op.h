// One operation, from submission until exactly one end.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "../base/error.h"
#include "../base/light_lock.h"
#include "../base/loop.h"
#include "../memory/region.h"
#include "block_sums.h"

namespace mr {

class Peer;
class Link;
class StreamGate;
}  // namespace mr

struct mr_op;

namespace mr {

enum class Verb : uint8_t { read, write, fetch_add, compare_and_swap, drop, map, connect, watch, lookup };
const char* verb_name(Verb verb);
inline bool is_atomic(Verb verb) { return verb == Verb::fetch_add || verb == Verb::compare_and_swap; }

// Work of an operation that a thread which waits for it may take part in.
class OpHelper {
 public:
  // Returns at `until`, when the operation is done, or when there is nothing (more) to help with.
  virtual void help(const mr_op& op, Time until) = 0;

 protected:
  ~OpHelper() = default;
};

}  // namespace mr

// A queue of ends, for asyncio.
struct mr_completions : std::enable_shared_from_this<mr_completions> {
  explicit mr_completions(mr::Fd event) : event(std::move(event)) {}
  void push(uint64_t tag);
  uint64_t take(uint64_t* out, uint64_t capacity);

  std::mutex lock;
  std::deque<uint64_t> tags;
  mr::Fd event;
  std::shared_ptr<mr_completions> held;  // the caller's reference
};

struct mr_op : std::enable_shared_from_this<mr_op> {
  // Set at submission, constant after.
  mr::Verb verb = mr::Verb::read;
  std::shared_ptr<const mr::RemoteRegion> remote;  // null where no region is meant
  mr::View remote_view, local_view;
  uint8_t* local = nullptr;
  int local_device = -1;  // whose memory `local` is; -1: the host's. Of a map: that is to reach the memory
  uint32_t flags = 0;
  mr::BlockSums block_sums;  // of a contiguous read
  bool has_notify = false;
  uint64_t notify = 0, operand[2] = {0, 0};
  std::string name;        // lookup; or the address that an inbox watches
  bool for_inbox = false;  // a watch
  bool is_quiet = false;   // ... without heartbeats; its peer may change that
  mr::Time submitted, deadline = mr::Time::max();
  std::shared_ptr<mr::Loop> loop;  // of the engine: a waiter may help it along
  std::weak_ptr<mr::Peer> peer;
  std::shared_ptr<mr::StreamGate> gate;  // that a stream of a GPU waits at until the operation is done
  bool admitted = false;                 // known to the peer's loop side
  std::string peer_name;                 // where there is no remote region to tell it
  // Called once, by whoever ends it, perhaps on the loop: must not wait.
  std::function<void(const mr::Status&)> on_end;

  // Owned by whoever has the operation at the time (the peer on its loop, or one link).
  std::shared_ptr<mr::Link> link;
  bool unreachable = false;  // on a lane that was tried
  uint32_t tried_lanes = 0;  // links that said "unavailable"; bit = index in the peer's list
  mr::Loop::TimerId timer{};
  bool has_timer = false;
  uint64_t request_id = 0;  // reply awaited on the control stream
  std::shared_ptr<void> lane_state;

  // What it did; written before finish.
  const char* lane = "";
  std::atomic<uint32_t> chunks{0}, rails{0}, retries{0};
  std::string skipped;
  int remote_state = MR_NOT_WRITTEN;
  uint64_t value = 0;
  mr::Bytes reply;
  std::shared_ptr<mr::Mapping> mapping;  // of the host's memory
  std::shared_ptr<uint8_t> opened;       // memory of a device, where it is reached as long as this lives

  // An early end was asked for (0: no). Checked by links between pieces.
  std::atomic<int> stop_kind{0};
  bool stopping() const { return stop_kind.load(std::memory_order_relaxed) != 0; }

  uint64_t bytes() const { return remote_view.bytes(); }
  bool on_device() const { return local_device >= 0 || (remote && remote->on_device); }
  // "read of 4096 bytes from trainer-0 (region 7)": the start of every message.
  std::string describe() const;

  // Exactly once; later calls return false and change nothing.
  bool finish(mr::Status&& status);
  bool finish(const mr::Status& status) { return finish(mr::Status(status)); }
  void set_helper(std::shared_ptr<mr::OpHelper> helper);  // kept until the operation is done
  // It is being stopped: a job of it that no thread has begun yet ends now, not when its turn comes.
  void wind_up();
  bool done() const { return (state_.load(std::memory_order_acquire) & kDone) != 0; }
  bool wait(double timeout);                            // negative: for ever
  const mr::Status& status() const { return status_; }  // of a done operation
  std::chrono::nanoseconds took() const { return finished_ - submitted; }
  double seconds() const { return std::chrono::duration<double>(took()).count(); }
  bool attach(std::shared_ptr<mr_completions> queue, uint64_t tag);
  // Whether it has ended, and nobody but its caller holds it.
  bool is_let_go() const { return done() && held.use_count() == 1; }
  // Of such a one: ready to be submitted once more, as it was described.
  void rearm(mr::Time now, mr::Time until);
  // Whom it is for. An operation that starts again mostly knows them, and to write down anew costs more than a look.
  void meet(const std::shared_ptr<mr::Loop>& its_loop, const std::shared_ptr<mr::Peer>& its_peer) {
    if (loop != its_loop) loop = its_loop;
    if (peer.owner_before(its_peer) || its_peer.owner_before(peer)) peer = its_peer;
  }

  // The caller's reference (mr_op_release gives it back).
  std::shared_ptr<mr_op> held;

 private:
  // Bits: a thread sleeps for it, a thread leads the loop for it, it is done.
  static constexpr uint32_t kWaited = 1, kLed = 2, kDone = 4;
  void sleep_until(mr::Time until);

  std::atomic<uint32_t> state_{0};
  std::shared_ptr<mr::OpHelper> helper();
  mr::LightLock lock_;
  std::shared_ptr<mr::OpHelper> helper_;
  std::shared_ptr<mr_completions> completions_;
  uint64_t tag_ = 0;
  mr::Status status_;
  mr::Time finished_;
};

namespace mr {
using Op = ::mr_op;
using OpRef = std::shared_ptr<Op>;
}  // namespace mr
