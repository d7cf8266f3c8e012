// A group: members with ranks 0 to n-1 that call the same collectives in the same order, and send each other messages.
// Here: who they are, how they wait for each other, and what happens when one of them fails. steps.h has how
// collectives go, messages.h how messages do.
//
// Each member has an arena. Two members on one host map each other's (they are "direct"); all others write into
// channels in the arenas, one-sided, with a notification for each piece.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../transport/node.h"
#include "exposure.h"

namespace mr {

struct EarlyMessage {
  int64_t tag;
  Bytes data;
};

// A member as this process sees it. What has no lock or atomic is for the thread that runs a collective.
struct Member {
  uint32_t rank = 0;
  std::string name;
  std::shared_ptr<const RemoteRegion> region;
  std::shared_ptr<Peer> peer;
  std::shared_ptr<Mapping> mapping;
  Arena arena;                      // where it is mapped
  std::atomic<bool> direct{false};  // each of us maps the other's arena
  Exposed exposed;                  // what else of its memory we read in place
  OpRef watch;
  std::atomic<uint32_t> hello{0};  // 1: it maps our arena, 2: it does not; above these bits a digest of its options
  std::atomic<bool> lost{false};
  // It has left: 1 + how many pieces it had sent us by then, of which so many have arrived. Not of direct members.
  std::atomic<uint64_t> left{0}, arrived{0};

  // Its progress, as far as we have looked: direct members.
  uint64_t staged = 0, combined = 0, taken = 0;
  // Pieces that went to it and came from it, by kind of traffic; and how many of ours it has told us that it has
  // consumed.
  uint64_t sent[kNumTraffic] = {}, received[kNumTraffic] = {};
  std::atomic<uint64_t> consumed[kNumTraffic] = {};

  std::mutex writing, reading;  // messages: one at a time in each direction
  std::deque<EarlyMessage> early;
  std::shared_ptr<Bytes> out;  // slots of messages on their way, where it is not direct
  std::vector<OpRef> out_ops = std::vector<OpRef>(kChannelSlots);
};

struct GroupOptions {
  uint32_t rank = 0, size = 0;
  uint64_t step_bytes = 0, message_bytes = 0, choices = 0;
  uint32_t spin = 0;
  mr_interrupted interrupted = nullptr;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  static GroupOptions checked(const mr_group_options& raw);  // throws MR_CONFIG
  static Geometry geometry_of(const GroupOptions& options);

  // `region` is all of `arena`, which is new and nobody else's.
  static std::shared_ptr<Group> create(std::shared_ptr<Node> node, const GroupOptions& options, RegionRef region);
  ~Group();

  // Finds all members by the handles of their arenas, in the order of ranks, and waits until they have found us.
  void join(const std::vector<RemoteRegion>& regions, Time deadline);
  // Leaves the group: the others still get what we have given. Nothing more is waited for, watched or mapped.
  void close();

  uint32_t rank() const { return options_.rank; }
  uint32_t size() const { return options_.size; }
  const GroupOptions& options() const { return options_; }
  Member& member(uint32_t rank) { return *members_[rank]; }
  const Arena& arena() const { return arena_; }
  const RegionRef& memory() const { return region_; }  // of the arena
  ArenaHead& head() const { return *arena_.head; }
  bool is_joined() const { return joined_.load(); }

  // The group has failed because of `rank`: everybody who waits hears of it, and all that is called later fails alike.
  void fail(uint32_t rank, int kind, const std::string& why);
  bool has_failed() const { return head().failure.load(std::memory_order_relaxed) != 0; }
  // Has failed for more than its collectives, which fail for good when they need a member that has left.
  bool is_over() const;
  void check_over() const {
    if (is_over()) throw Error(failure());
  }
  bool has_left(const Member& member) const;
  // Collectives need more of a member that has left.
  void lack(const Member& member);
  Error left_error(const Member& member) const;
  Status failure() const;       // ok where it has not failed
  int64_t failed_rank() const;  // -1 where it has not failed
  void check() const {
    if (has_failed()) throw Error(failure());
  }

  // Waits until `ready`, which looks at what member `whom` does in a collective.
  // `waker`: kAnyMember where others may bring it about as well.
  template <typename Ready>
  void await(Member& whom, Time deadline, Ready&& ready, uint32_t waker = 0);
  // The same for messages: `asleep` tells the other side that it must ring.
  template <typename Ready>
  bool await_message(Bell& bell, const std::vector<std::atomic<uint32_t>*>& asleep, Time deadline, Ready&& ready);

  // Sets a counter of ours, and wakes direct members that wait for us.
  void publish(std::atomic<uint64_t>& counter, uint64_t value);
  // A direct member that sleeps until we have done something.
  void wake_waiter(const Member& member) const;
  // Writes a piece, head first, into our channel at a member that is not direct. The bytes stay until the operation is
  // done, with what keeps them.
  OpRef write_piece(Member& to, Traffic traffic, uint64_t number, const uint8_t* piece, uint64_t bytes,
                    std::shared_ptr<void> keep);
  void tell_consumed(Member& from, Traffic traffic, uint64_t count);

  // Lets those on this host read the call's tensors in place, until what is returned goes; null where they can't.
  std::unique_ptr<Exposure> expose(const mr_collective& call);
  // Bytes of a direct member's memory. They are what it meant if check_exposed_by, after they were read, does not
  // throw.
  const uint8_t* exposed_by(Member& from, uint64_t place, uint64_t bytes, Time deadline);
  void check_exposed_by(const Member& from);

  std::mutex running;                                            // one collective at a time
  uint64_t next_step = 0;                                        // for who has it
  uint64_t turn = 0;                                             // how many it was
  uint64_t next_out = 0;                                         // slot of our own channel
  std::vector<std::pair<Member*, OpRef>> leaving[kStagedSteps];  // operations that read one of our slots

 private:
  Group(std::shared_ptr<Node> node, const GroupOptions& options, RegionRef region);
  void find(Member& member, Time deadline);
  void greet(Member& member, Time deadline);
  OpRef notify(Member& to, uint64_t value);
  void leave();
  void on_notify(uint64_t value);
  OpRef start(Member& to, Verb verb, Time deadline);
  void on_lost(uint32_t rank, const Status& why);
  [[noreturn]] void time_out(Member& whom);
  void tell_all(uint64_t failure_word);
  void on_signal();  // a wait was interrupted: throws where its caller wants it to end

  const std::shared_ptr<Node> node_;
  const GroupOptions options_;
  const RegionRef region_;
  Arena arena_;
  std::vector<std::unique_ptr<Member>> members_;
  std::atomic<bool> joined_{false}, closed_{false};

  Spinning spinning_;

  mutable std::mutex failure_lock_;
  int64_t told_rank_ = -1;  // whom the words are about
  std::string told_;
};

template <typename Ready>
void Group::await(Member& whom, Time deadline, Ready&& ready, uint32_t waker) {
  // Between hosts the threads that carry the bytes need the processors more.
  if (whom.direct && spinning_.until([&] { return ready() || has_failed(); })) {
    if (ready()) return;
    check();
  }
  struct Asleep {
    std::atomic<uint32_t>& awaits;
    ~Asleep() { awaits.store(0, std::memory_order_relaxed); }
  } asleep{head().awaits};
  for (;;) {
    const uint32_t seen = head().steps.rung.load();
    asleep.awaits.store(waker != 0 ? waker : whom.rank + 1);
    const bool left = has_left(whom);  // before we look at what it has given
    if (ready()) return;
    check();
    if (left) lack(whom), check();
    if (deadline != Time::max() && Clock::now() >= deadline) time_out(whom);
    if (!head().steps.sleep(seen, deadline)) on_signal();
  }
}

template <typename Ready>
bool Group::await_message(Bell& bell, const std::vector<std::atomic<uint32_t>*>& asleep, Time deadline, Ready&& ready) {
  bool is_ready = false;  // looking may take what is there: once
  if (spinning_.until([&] { return (is_ready = ready()) || is_over(); })) {
    if (is_ready || ready()) return true;
    check_over();
  }
  struct Asleep {
    const std::vector<std::atomic<uint32_t>*>& flags;
    ~Asleep() {
      for (auto* flag : flags) flag->fetch_sub(1);
    }
  } guard{asleep};
  for (auto* flag : asleep) flag->fetch_add(1);
  for (;;) {
    const uint32_t seen = bell.rung.load();
    if (ready()) return true;
    check_over();
    if (deadline != Time::max() && Clock::now() >= deadline) return false;
    if (!bell.sleep(seen, deadline)) on_signal();
  }
}

}  // namespace mr
