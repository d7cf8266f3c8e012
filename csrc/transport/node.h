// One engine: its loop, its memory, its doors and everyone it knows.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "../base/counters.h"
#include "listener.h"
#include "peer.h"

namespace mr {

class Node : public Home, public std::enable_shared_from_this<Node> {
 public:
  static std::shared_ptr<Node> create(Options options, std::vector<LaneType> lanes);
  ~Node();

  // Ends every operation, every peer and the loop thread; returns when nothing of ours runs any more.
  void close();
  bool is_ours() const { return is_this_process(pid_); }  // not in a forked child of the process that made it
  void check_usable() const;  // throws MR_CONFIG: closed, or a forked child of the process that made it

  const std::string& address() const { return self_.address; }
  const PeerInfo& self() override { return self_; }
  RegionTable& regions() override { return regions_; }
  const Options& options() override { return options_; }
  Counters& counters() { return counters_; }
  std::shared_ptr<Loop> loop_ref() { return loop_; }
  std::map<std::string, uint64_t> counts();

  std::shared_ptr<Peer> peer_of(const Address& address);
  void submit(const std::shared_ptr<Peer>& peer, const OpRef& op) override;
  // See Peer::read_now.
  const char* read_now(Peer& peer, const RemoteRegion& remote, uint8_t* local, uint64_t offset, uint64_t length,
                       uint32_t flags);
  // Drops a region of ours; the operation is done when nobody is in it any more.
  OpRef drop(const RegionRef& region);
  void shared_free(void* address);

  void put_fault(const Address& address, const Fault& fault);  // MR_PEER_LOST where there is no connection

  void publish(const std::string& name, Bytes data);
  void unpublish(const std::string& name);

  Inbox& inbox() { return inbox_; }
  // Tells the inbox when the peer is lost, once, as of `address`.
  void watch(const std::shared_ptr<Peer>& peer, const std::string& address, bool heartbeats);
  void set_message_handler(mr_message_handler handler, void* context);
  Status reply_message(ByteView data);

  // The address under which memory of a peer is mapped here stays valid until as many unmaps.
  void keep_mapping(std::shared_ptr<void> mapping, void* address);
  void release_mapping(void* address);

  // Home
  Loop& loop() override { return *loop_; }
  const std::vector<LaneType>& lanes() override { return lanes_; }
  void drop_on_loop(uint64_t region_id, std::function<void(Status)> done) override;
  Bytes lookup(const std::string& name) override;
  void deliver_on_loop(Peer& from, const std::shared_ptr<Intake>& intake, ByteView head, ByteView body) override;
  void watched_lost_on_loop(const std::string& address, const Status& why) override;
  void session_on_loop(uint64_t session_id, const std::shared_ptr<Peer>& peer, bool begin) override;
  void count(const char* counter, uint64_t amount) override { counters_.add(counter, amount); }
  void op_ended() override { ops_in_flight_.fetch_sub(1); }

 private:
  Node(Options options, std::vector<LaneType> lanes);
  void start();
  void run_and_wait(const Task& task);
  void flush(Time deadline);
  void handle_on_loop(Peer& from, const std::string& sender, ByteView data);
  void handle_early_on_loop();
  void begin_op();
  void arrived_on_loop(std::shared_ptr<ControlStream> stream);
  void await_quiet_on_loop(const RegionRef& region, Time deadline, std::function<void(Status)> done);
  bool anyone_in(uint64_t region_id);
  bool is_quiet(Region& region);  // of a region whose access has ended
  std::vector<std::shared_ptr<Peer>> all_peers();
  void forget_ended_locked();

  const Options options_;
  const int pid_;
  PeerInfo self_;
  Counters counters_;
  Strangers strangers_{options_.name, counters_};  // on the loop
  RegionTable regions_;
  std::shared_ptr<Loop> loop_;
  std::vector<LaneType> lanes_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<MayTrace> may_trace_;  // any process
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> ops_in_flight_{0};

  std::mutex peers_lock_;
  std::unordered_map<std::string, std::shared_ptr<Peer>> peers_;  // by incarnation, or by plain host:port
  size_t sweep_at_ = 64;  // entries at which peers that ended long ago are looked for
  std::unordered_map<uint64_t, std::shared_ptr<Peer>> sessions_;  // on the loop
  std::atomic<uint64_t> streams_up_{0};

  std::mutex published_lock_;
  std::unordered_map<std::string, Bytes> published_;

  Inbox inbox_{loop_};
  mr_message_handler handler_ = nullptr;
  void* handler_context_ = nullptr;
  Peer* handling_from_ = nullptr;

  std::mutex mappings_lock_;
  std::map<void*, std::pair<std::shared_ptr<void>, int>> mappings_;
};

}  // namespace mr
