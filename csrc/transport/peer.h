// One remote process: its control stream, its links, and our operations on its regions. Picks the best link, falls back
// to the next, retries nothing that is not safe to retry, and answers each operation exactly once.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../base/published.h"
#include "control.h"
#include "dialer.h"
#include "inbox.h"
#include "lane.h"
#include "ptrace.h"

namespace mr {

// What a message takes of the window: it bounds the memory that many small ones need, too.
inline uint64_t message_cost(uint64_t bytes) { return bytes + 128; }

// What all peers of an engine share and serve from. Implemented by the engine; no lane is named below this line.
class Home {
 public:
  struct LaneType {
    const char* name;
    uint16_t first_frame;                                  // its control frames: first_frame .. first_frame + 99
    uint32_t flag;                                         // mr_flags bit that asks for it
    std::function<std::shared_ptr<Link>(LinkHost&)> make;  // null result: not with this peer
    // The same for this process's own regions; empty: not there.
    std::function<std::shared_ptr<Link>(LinkHost&)> make_own = {};
  };

  virtual Loop& loop() = 0;
  virtual RegionTable& regions() = 0;
  virtual const Options& options() = 0;
  virtual const PeerInfo& self() = 0;
  virtual const std::vector<LaneType>& lanes() = 0;  // best first
  // Drops one of our regions; `done` once nobody is in it, or at the timeout. On the loop.
  virtual void drop_on_loop(uint64_t region_id, std::function<void(Status)> done) = 0;
  // A published blob; throws MR_CONFIG where there is none.
  virtual Bytes lookup(const std::string& name) = 0;
  virtual void deliver_on_loop(Peer& from, const std::shared_ptr<Intake>& intake, ByteView head, ByteView body) = 0;
  virtual void watched_lost_on_loop(const std::string& address, const Status& why) = 0;
  virtual void session_on_loop(uint64_t session_id, const std::shared_ptr<Peer>& peer, bool begin) = 0;
  virtual void count(const char* counter, uint64_t amount) = 0;
  virtual void op_ended() = 0;
  // Any thread. Counts the operation and hands it to the peer; throws where the engine is closed.
  virtual void submit(const std::shared_ptr<Peer>& peer, const OpRef& op) = 0;

 protected:
  ~Home() = default;
};

class Peer : public LinkHost, public ControlStream::Handler, public std::enable_shared_from_this<Peer> {
 public:
  Peer(Home& home, Address address);
  ~Peer();

  // Any thread. The operation ends in one Op::finish.
  void submit(const OpRef& op);
  void stop(const OpRef& op, int kind);
  // Any thread. Whether a lane has a read_now: in vain it costs as much as a tenth of a small operation.
  bool reads_now() const { return reads_now_.load(std::memory_order_relaxed); }
  // Any thread. See Link::read_now, of the lane that the flags allow; null also where that is not the best one.
  const char* read_now(const RemoteRegion& remote, uint8_t* local, uint64_t offset, uint64_t length, uint32_t flags);

  void adopt_on_loop(std::shared_ptr<ControlStream> stream);  // accepted; it is up
  void become_self_on_loop();                                 // this process itself
  void stop_all_on_loop(int kind);
  bool has_unsent_on_loop() const;             // frames that its socket has not taken yet
  void close_on_loop(const Status& why);       // ends everything, for good
  bool put_fault_on_loop(const Fault& fault);  // false: not connected to another process
  bool touches(uint64_t region_id);
  bool resting() const { return resting_.load(); }              // not connected, and nothing pending: may be forgotten
  void broadcast_on_loop(uint16_t type, const Bytes& payload);  // of a lane, to a peer that is up and has it
  DataDoor::Session session_on_loop(uint64_t session_id);
  const Address& address() const { return address_; }
  std::string lane_name(const RemoteRegion& remote);  // any thread; "" while not connected

  // Messages: any thread. Connects if need be, and waits while the peer's window is full.
  Status send_message(ByteView head, ByteView body, double timeout);
  Status reply_message_on_loop(ByteView data);
  void give_credit(const std::shared_ptr<Intake>& intake);
  // While it is watched its loss is told to home, under the address in the watch's name.
  void unwatch();

  // LinkHost
  Loop& loop() override { return home_.loop(); }
  RegionTable& regions() override { return home_.regions(); }
  const Options& options() override { return home_.options(); }
  const PeerInfo& info() override { return info_; }
  uint64_t session_id() override;
  Digest session_key() override;
  void send_on_loop(uint16_t type, Bytes payload, const Fd* pass_fd) override;
  void request_on_loop(uint16_t type, Bytes payload, std::function<void(Reply)> on_reply) override;
  void heard_on_loop() override { last_heard_ = Clock::now(); }
  void on_done(const OpRef& op, Status status) override;
  void count(const char* counter, uint64_t amount) override { home_.count(counter, amount); }
  void submit_part(const OpRef& part) override { home_.submit(shared_from_this(), part); }
  void stop_part(const OpRef& part, int kind) override { stop(part, kind); }

 private:
  enum class State { idle, connecting, up, self, closed };
  struct Lane {
    std::shared_ptr<Link> link;
    uint32_t flag;  // mr_flags bit
    uint16_t first_frame;
  };
  using Links = std::vector<Lane>;  // best first

  // The life of an operation.
  static Link* best_of(const Links& links, const Op& op, uint32_t flags);
  void admit_on_loop(const OpRef& op);
  void watch_again_on_loop(const OpRef& op);
  void dispatch_on_loop(const OpRef& op);
  void next_link_on_loop(const OpRef& op);
  void request_op_on_loop(const OpRef& op, uint16_t type, Bytes payload);
  uint64_t send_request_on_loop(uint16_t type, const Bytes& payload, std::function<void(Reply)> on_reply);
  void done_on_loop(const OpRef& op, Status status);
  void notify_on_loop(const OpRef& op);
  void finish_on_loop(const OpRef& op, Status status);
  void stop_on_loop(const OpRef& op, int kind);
  void rest_on_loop();

  // The connection.
  void connect_on_loop();
  void connect_after_cut_on_loop();
  void up_on_loop(std::shared_ptr<ControlStream> stream);
  void lost_on_loop(const Status& why);
  bool needs_beats() const { return pending_.size() > num_quiet_; }
  void beat_on_loop();
  void probe_on_loop();
  OpRef start(Verb verb, Time deadline);
  Status take_window(uint64_t size, Time deadline, uint64_t* connection);
  Status wait_for_window(std::unique_lock<std::mutex>& guard, uint64_t cost, Time deadline, uint64_t connection);
  void credit_on_loop(uint64_t bytes);
  Status connect_within(Time deadline);
  bool message_on_loop(ByteView head, ByteView body, uint64_t connection);
  void watch_process_on_loop();
  void process_ended_on_loop();
  Status process_ended() const;
  void drain_on_loop();
  void open_window_on_loop();
  void on_frame(ControlStream& stream, Frame& frame) override;
  void on_closed(ControlStream& stream, const Status& status) override;

  // The peer's requests.
  Reply serve_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds);
  Reply serve_lane_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds);
  void serve_request_on_loop(uint16_t type, ByteView payload, std::vector<Fd> fds, std::function<void(Reply)> answer);
  void settle_on_loop(uint64_t request_id, Reply reply);

  std::shared_ptr<const Links> links() const { return links_.get(); }
  void set_links_on_loop(Links links);

  Home& home_;
  const Address address_;
  State state_ = State::idle;
  std::atomic<bool> resting_{true};
  PeerInfo info_;
  std::shared_ptr<Dialer> dialer_;
  std::vector<std::shared_ptr<ControlStream>> streams_;  // the first carries what we begin
  std::unordered_set<OpRef> pending_;
  std::vector<OpRef> waiting_;                  // for the connection
  size_t num_watches_ = 0, num_quiet_ = 0;      // of the pending ones
  uint64_t next_request_ = 1, connection_ = 0;  // connection_: how often it was up
  std::unordered_map<uint64_t, std::function<void(Reply)>> requests_;
  Time last_heard_{}, next_beat_{};
  Time cut_until_{};  // by a fault put on the connection; nothing is dialled before
  bool beating_ = false, probing_ = false;
  class ProcessWatch;
  std::unique_ptr<ProcessWatch> process_;
  std::unique_ptr<MayTrace> may_trace_;

  Published<const Links> links_{std::make_shared<const Links>()};  // replaced on the loop
  std::atomic<bool> reads_now_{false};                             // one of them

  // Message window towards the peer.
  std::mutex window_lock_;
  std::condition_variable window_opened_;
  std::deque<const void*> senders_;  // that wait, first come first
  uint64_t window_ = 0, window_used_ = 0, max_frame_ = 0;
  uint64_t window_of_ = 0;  // the connection it belongs to; 0: not connected
  std::shared_ptr<Intake> intake_;
  OpRef inbox_watch_;
};

}  // namespace mr
