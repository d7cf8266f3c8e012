// The reader's and writer's side of the verbs lane: operations are cut into work requests, which go out on queue pairs
// that have room. Small ones are posted by the calling thread. All else is on the loop; completions come from any
// thread.
//
// A queue pair that fails is shut, which ends the card's access to our memory, and the peer is asked to destroy its end
// (the fence). Until it has, nothing new is posted where an old write may still be on its way: it would be overtaken.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "lane.h"
#include "verbs_domain.h"
#include "verbs_keys.h"
#include "verbs_transfer.h"

namespace mr {

class VerbsClient : public QueuePair::Sink,
                    public VerbsListener,
                    public OpHelper,
                    public std::enable_shared_from_this<VerbsClient> {
 public:
  VerbsClient(LinkHost& host, std::shared_ptr<VerbsDomain> domain);
  ~VerbsClient();

  bool try_inline(const OpRef& op);  // any thread
  void stop_inline(int kind);        // on the loop: those that try_inline has posted
  std::string refuses(const Op& op) const;
  // On the loop.
  void start(const OpRef& op);
  void stop(const OpRef& op);
  void close(const Status& why);
  void abandon();  // after close: waits no longer for the kernel
  void on_rails(std::vector<RailFace> theirs);
  void on_accept(const VerbsAccept& accept);
  void on_fenced(uint64_t number);
  void on_keys(VerbsKeys keys);
  void on_gone(uint64_t region);

 private:
  static constexpr uint64_t kLargeBytes = 256u << 10;  // from here on an operation is worth more than one queue pair
  static constexpr uint32_t kMaxRegistering = 256;     // operations that are not large whose memory is registered

  enum WorkKind : uint32_t { kSmallWork, kPart, kProbe, kAtomicWork };
  using Staged = std::pair<std::shared_ptr<StagingBlocks>, uint8_t*>;

  // A connection: a queue pair of ours and its other end, from the first thought of it until the fence is up.
  struct Connection {
    enum State { opening, offered, connecting, probing, up, closing, fencing, gone };
    uint64_t number = 0;
    size_t rail = 0;
    uint32_t slot = 0;
    State state = opening;
    bool known_there = false;  // an offer was sent
    bool ever_up = false;
    VerbsCardRef card;
    QueuePairRef pair;
    std::shared_ptr<void> permit;
    Workers::StrandRef strand = Workers::new_strand();           // of all that the kernel is asked for it
    std::vector<Staged> staged;                                  // blocks that the card may yet write to
    uint64_t bytes = 0;                                          // posted, not ended
    std::unordered_map<const VerbsTransfer*, uint32_t> carries;  // requests of each
    uint64_t ghosts = 0;                                         // writes that the fence waits for
    Status why;                                                  // it is closing
    Loop::TimerId timer{};
    bool has_timer = false;
  };
  using ConnectionRef = std::shared_ptr<Connection>;

  struct RailState {
    RailPair path;
    uint16_t their_lid = 0;
    bool reaches = false;  // a rail of theirs
    bool down = false;     // the port said so
    VerbsCardRef card;     // of its queue pairs that are up
    uint32_t failures = 0;
    Time retry_at{};
    Time more_at{};                    // not before: a second queue pair could not be made
    Status why;                        // of the last failure
    std::vector<ConnectionRef> slots;  // null: none
  };

  // Where small operations go, for any thread.
  struct Route {
    QueuePairRef pair;
    VerbsCardRef card;
    uint32_t their_rail;
  };
  // For each order of NearRails.
  struct Near {
    std::atomic<Route*> route{nullptr};
    std::atomic<bool> is_far{false};    // there is a rail that is nearer
    std::atomic<bool> used_far{false};  // it was taken all the same
  };

  // Rails and queue pairs: verbs_client_pairs.cc
  void ask_rails();
  void open(size_t rail, uint32_t slot);
  void open_some(bool large);
  // What a worker has made for a connection.
  struct Made {
    VerbsCardRef card;
    QueuePairRef pair;
    std::shared_ptr<void> permit;
    Status status;
  };
  Made make_pair(const Connection& connection);
  void opened(const ConnectionRef& connection, Made made);
  void refuse(const ConnectionRef& connection, const Status& why);
  void connected(const ConnectionRef& connection, const Status& status);
  void up(const ConnectionRef& connection);
  void lose(const ConnectionRef& connection, Status why, bool blame_rail);
  void lose_rail(size_t rail, const Status& why);
  void shut(const ConnectionRef& connection);
  void try_later(size_t rail);
  void wrest(const ConnectionRef& connection);
  void bury(const ConnectionRef& connection, bool quiet);
  void resolve(Connection& connection, Work& work, const QueuePairFailure* cause);
  void resolve_small(Connection& connection, Work& work, const QueuePairFailure* cause);
  void set_timer(const ConnectionRef& connection, double seconds, const char* what);
  void cancel_timer(Connection& connection);
  void choose_routes();
  Route* route_by(const Connection& connection);
  void clear_routes();
  void drop_old_routes();
  void open_nearer();
  const std::vector<size_t>& order_here() const;
  bool may_use(size_t rail) const;
  bool has_other_lanes(const Op& op) const;
  bool worth_waiting(const VerbsTransfer& transfer) const;
  std::string why_unusable(const VerbsTransfer& transfer) const;
  std::string name_of(size_t rail) const;
  bool is_open(const Connection& connection) const { return connection.state < Connection::closing; }

  // Nothing is posted while the fate of an older write is not known.
  bool is_blocked() const { return ghosts_ > 0 || closing_ > 0; }

  // Operations: verbs_client.cc
  bool post_small(const OpRef& op);
  void watch_small();
  void look_at_deadlines();
  Time end_overdue();
  void end_overdue_soon();
  static Status stopped(int kind);
  VerbsTransferRef begin(const OpRef& op);
  void enqueue(const VerbsTransferRef& transfer);
  void pump();
  void pump_small();
  bool has_left(const VerbsTransferRef& transfer);
  void attempt(const VerbsTransferRef& transfer);
  bool post_some(const VerbsTransferRef& transfer);
  Connection* choose(const VerbsTransferRef& transfer);
  bool leaves_to_others(VerbsTransfer& transfer, size_t rail);
  bool is_up(size_t rail) const;
  Connection* idlest(size_t rail, bool large) const;
  bool is_full(bool large) const;
  static bool is_waiting(const VerbsTransfer& transfer);
  static bool is_large(const VerbsTransfer& transfer);
  static bool is_small(const VerbsTransfer& transfer);
  bool prepare(const VerbsTransferRef& transfer, size_t rail);
  const VerbsKeys* keys_for(const VerbsTransferRef& transfer, size_t rail);
  bool takes_turn_to_register(VerbsTransfer& transfer);
  void let_others_register(VerbsTransfer& transfer);
  void register_local(const VerbsTransferRef& transfer, size_t rail);
  bool post_on(Connection& connection, const VerbsTransferRef& transfer);
  void give_up(const VerbsTransferRef& transfer);
  void break_off(const VerbsTransferRef& transfer);
  void settle(const VerbsTransferRef& transfer);
  void end(const VerbsTransferRef& transfer, Status status);
  void parts_done();
  void end_small(Work& work, Status&& status);

  // QueuePair::Sink, VerbsListener, OpHelper
  void on_done(QueuePair& pair, std::span<Work> done) override;
  void on_broken(QueuePair& pair) override;
  void on_quiet(QueuePair& pair) override;
  void on_port(size_t rail, bool up) override;
  void on_card_lost(const VerbsCardRef& card) override;
  void on_pair_event(uint32_t queue_pair, const char* what) override;
  void help(const mr_op& op, Time until) override;

  LinkHost& host_;
  Loop& loop_;
  const std::shared_ptr<VerbsDomain> domain_;
  const std::chrono::nanoseconds hardware_limit_;  // the card ends a request within it; 0: not for sure

  // On the loop.
  bool asked_rails_ = false, have_rails_ = false, closed_ = false;
  Status closed_why_;
  std::vector<RailState> rails_;
  uint64_t next_number_ = 1;
  std::map<uint64_t, ConnectionRef> connections_;
  std::unordered_map<const QueuePair*, ConnectionRef> by_pair_;
  std::deque<VerbsTransferRef> small_, large_;
  uint32_t registering_ = 0;        // of small_, or posted
  bool registers_in_turn_ = false;  // more of small_ want to
  VerbsKeyBook keys_;
  uint64_t posted_at_last_look_ = 0;
  uint64_t ghosts_ = 0;                         // writes that may still be on their way
  uint32_t closing_ = 0;                        // connections that are
  std::vector<std::unique_ptr<Route>> routes_;  // those in use, and those that threads may still hold

  // For any thread.
  std::vector<Near> near_;
  std::atomic<uint32_t> inside_{0};  // threads that may hold a route
  VerbsKeyCache key_cache_;
  std::atomic<bool> reaches_nothing_{false};  // as far as is known
  std::atomic<bool> waits_for_room_{false};   // operations wait for requests to end
  std::atomic<bool> watched_{false};          // the deadlines of what try_inline has posted
  std::mutex done_lock_;
  std::vector<std::pair<QueuePairRef, Work>> done_;  // parts of transfers
  bool done_scheduled_ = false;
  std::mutex poll_lock_;
  std::vector<QueuePairRef> polled_;  // that are up
};

}  // namespace mr
