// The contract of a lane: how bytes move between this process and one peer. A Link carries both directions: our
// operations on the peer's regions, and (where the lane needs the owner's help) the peer's operations on ours.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "../base/loop.h"
#include "../base/stream.h"
#include "../memory/region.h"
#include "faults.h"
#include "op.h"
#include "options.h"

namespace mr {

// Internal outcome: this link can't carry the operation after all and nothing of it is in flight; try the next lane.
constexpr int kUnavailable = -1;
// The same, because the peer can't be reached this way: where no lane is left, it counts as lost.
constexpr int kUnreachable = -2;

// Types of control frames. Each lane has its own hundred.
enum FrameType : uint16_t {
  kHello = 1,
  kHelloReply,
  kHelloProof,  // before the stream is up
  kReply,
  kPing,
  kPong,
  kBye,
  kNotify,
  kAtomic,
  kDrop,
  kLookup,
  kMessage,
  kCredit,
  kShmOffer = 100,
  kShmMap,
  kShmGone,
  kTcpFence = 200,
  kTcpGone,
  kVerbsAsk = 300,  // see verbs_wire.h
  kVerbsRails,
  kVerbsOffer,
  kVerbsAccept,
  kVerbsFence,
  kVerbsFenced,
  kVerbsWant,
  kVerbsKeys,
  kVerbsGone,
  kIpcMap = 400,
  kIpcAnswer,
  kIpcGone,
  kIpcLeft,
  kStagedSlots = 500,
  kStagedPack,
  kStagedUnpack,
  kStagedAnswer,
};

struct Reply {
  Status status;  // of the peer, or why there is none from it
  Bytes payload;
  Fd fd;
  bool from_peer = false;
};

// What a process tells about itself in the hello.
struct PeerInfo {
  std::string name;
  uint64_t incarnation = 0;
  std::string boot_id;  // same boot_id: same host
  std::string address;
  std::string lanes;          // that it offers
  std::vector<HostPort> tcp;  // where its data sockets are accepted
  bool bulk_tls = false;
  uint64_t max_frame = 0;       // largest control frame it accepts
  uint64_t message_window = 0;  // unread message bytes it accepts from one peer
  int pid = 0;                  // from the kernel, in our pid namespace; 0 where unknown
  bool over_unix = false;
};

// What a link may ask of its peer and engine. On the loop unless said otherwise.
class LinkHost {
 public:
  virtual Loop& loop() = 0;
  virtual RegionTable& regions() = 0;
  virtual const Options& options() = 0;
  virtual const PeerInfo& info() = 0;
  virtual uint64_t session_id() = 0;  // of the control stream of our operations
  virtual Digest session_key() = 0;
  virtual void send_on_loop(uint16_t type, Bytes payload, const Fd* pass_fd = nullptr) = 0;
  // The reply comes exactly once, with MR_PEER_LOST at the latest when the stream ends.
  virtual void request_on_loop(uint16_t type, Bytes payload, std::function<void(Reply)> on_reply) = 0;
  virtual void heard_on_loop() = 0;  // bytes arrived: the peer is alive
  // Any thread. Ends the link's part of the operation; exactly once for each start.
  virtual void on_done(const OpRef& op, Status status) = 0;
  virtual void count(const char* counter, uint64_t amount) = 0;  // any thread
  // Any thread. An operation on the same peer that is a part of another one, over host memory; throws where the engine
  // is closed. It ends like any other, see Op::on_end.
  virtual void submit_part(const OpRef& part) = 0;
  virtual void stop_part(const OpRef& part, int kind) = 0;

 protected:
  ~LinkHost() = default;
};

class Link {
 public:
  virtual ~Link() = default;
  virtual const char* lane() const = 0;  // "shm", "verbs", "tcp", "local", "ipc", "staged"
  // Any thread. Whether it is about such memory at all: most lanes know only the host's.
  virtual bool carries(const Op& op) const { return !op.on_device(); }

  // Any thread. The reason why it can't carry this operation, or "".
  virtual std::string refuses(const Op& op) const = 0;
  // Any thread. Carries out a small operation at once and reports to on_done, before it returns or soon after, from any
  // thread; false if it is not small or not possible right now, and then nothing has happened.
  virtual bool try_inline(const OpRef& op) = 0;
  // Whether it has a read_now.
  virtual bool reads_now() const { return false; }
  // Any thread. Reads bytes [offset, offset + length) of a region in the host's memory before it returns, where that
  // takes no longer than to start an operation, and tells the lane's name as mr_result does. Null: an operation has to
  // do it, which also finds out what was wrong; `local` may have changed.
  virtual const char* read_now(const RemoteRegion&, uint8_t* /*local*/, uint64_t /*offset*/, uint64_t /*length*/) {
    return nullptr;
  }
  // On the loop. Starts a read or write; it ends in one LinkHost::on_done, from any thread, perhaps inside this call.
  virtual void start_on_loop(const OpRef& op) = 0;
  // On the loop. op->stop_kind is set: ends it soon. After on_done its local memory is not touched.
  virtual void stop_on_loop(const OpRef& op) = 0;
  // On the loop. The same for all that try_inline took and that have not ended; `kind` becomes their stop_kind.
  virtual void stop_inline_on_loop(int) {}
  // On the loop. The peer is gone: ends all with `why`. Never used again, but other threads may still be inside.
  virtual void close_on_loop(const Status& why) = 0;
  // On the loop, after close: the engine can't wait any longer. What has not ended ends now, even if its memory may
  // still be touched.
  virtual void abandon_on_loop() {}
  // On the loop. Control frames of this lane. reply is sent back where the frame was a request.
  virtual void on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds, Reply& reply) = 0;
  // On the loop. Puts a fault on the lane's own connections to the peer; not all lanes have any.
  virtual void put_fault_on_loop(const Fault&) {}
  // Any thread. Is the peer inside this region of ours right now (owner's side)?
  virtual bool touches(uint64_t region_id) const = 0;
  // On the loop. For Verb::map: puts the mapping of the region's shared memory into op->mapping, or that of
  // device memory into op->opened, then on_done.
  virtual void map_on_loop(const OpRef& op) = 0;
  // The lane's name for this operation, more exact than lane(): "shm-mapped".
  virtual const char* lane_for(const RemoteRegion& remote) const = 0;
};

std::shared_ptr<Link> make_shm(LinkHost& host);
std::shared_ptr<Link> make_tcp(LinkHost& host);
// Operations of this process on its own regions.
std::shared_ptr<Link> make_local(LinkHost& host);

// The tcp lane's door: takes over accepted sockets of the data listener, reads the hello (a session, a socket number, a
// proof), and hands each to the link of its session. Strangers are shown out. All on the loop.
class DataDoor {
 public:
  struct Session {
    std::shared_ptr<Link> link;
    Digest key{};
  };
  using Find = std::function<Session(uint64_t session_id)>;  // link is null where there is none
  using Refused = std::function<void(const std::string& from, const Status& why)>;

  virtual ~DataDoor() = default;
  virtual void accept_on_loop(Fd socket) = 0;  // non-blocking; the door sees itself whether it speaks TLS
  virtual void close_on_loop() = 0;
};
std::unique_ptr<DataDoor> make_data_door(Loop& loop, const Options& options, DataDoor::Find find,
                                         DataDoor::Refused refused = {});

}  // namespace mr
