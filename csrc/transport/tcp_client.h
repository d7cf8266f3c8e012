// The reader's and writer's side of the tcp lane: operations are cut into parts, parts go out on the data sockets that
// have room, and an operation ends when all its parts have.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "tcp_dial.h"
#include "tcp_socket.h"

namespace mr::tcp {

// Bytes [begin, begin + length) of an operation: what one request moves.
struct Part {
  uint64_t begin, length;
  uint32_t repeats = 0;
};

// An operation on its way.
struct Transfer {
  explicit Transfer(OpRef op) : op(std::move(op)) {}

  bool is_write() const { return op->verb == Verb::write; }
  bool has_parts() const { return failure.ok() && !ended && (!again.empty() || !cut || next < op->bytes()); }
  Part take_part();

  const OpRef op;
  uint64_t next = 0;           // the first byte that is in no part yet
  bool cut = false;            // there has been a part: an operation of no bytes has one too
  std::vector<Part> again;     // to be posted again
  uint32_t open = 0;           // parts on sockets or behind fences
  uint32_t maybe_written = 0;  // parts whose bytes may have reached the region
  uint64_t sockets = 0;        // bit set
  bool queued = false;
  bool ended = false;  // on_done is due or was called: its memory is out of bounds
  Status failure;      // the first one; no part is begun after it
};
using TransferRef = std::shared_ptr<Transfer>;

class Client;

// One data socket that we opened: requests out, answers in, in the same order.
class ClientSocket final : public Socket {
 public:
  ClientSocket(Client& client, LinkHost& host, std::shared_ptr<Staging> staging, Stream stream, uint64_t session,
               uint64_t number, uint32_t slot);

  struct Posted {
    uint32_t id;
    TransferRef transfer;  // null: a cancel
    Part part;
    uint32_t cancels = 0;             // id
    size_t head_left;                 // of the request, not sent
    std::optional<ChunkSender> data;  // of a write
    uint64_t received = 0;            // of a read, in whole chunks
    uint64_t summed = 0;              // of these and the chunk at hand
    bool begun = false;               // a byte of it has left
    bool maybe_written = false;       // a byte of its data has
  };

  bool has_room() const;
  uint64_t bytes_posted() const { return bytes_posted_; }
  // False while enough answers are awaited that the next of them can take what is unsent along, in one system call.
  bool worth_a_call() const;
  void post(const TransferRef& transfer, const Part& part);
  // Leaves nothing of the transfer's memory in use. False where only closing the socket can do that.
  bool withdraw(const TransferRef& transfer);
  std::deque<Posted> take_posted();  // of a broken socket

  const uint64_t session, number;
  const uint32_t slot;

 private:
  size_t head_bytes(const uint8_t*, size_t) const override { return sizeof(Chunk); }
  void on_head(const uint8_t* head) override;
  void on_payload() override;
  void on_payload_end() override;
  size_t read_ahead() const override;
  void gather(Gather& out) override;
  void sent(size_t length) override;
  void on_broken(const Status& why) override;
  void after_event() override;

  void post_cancel(uint32_t id);
  size_t encode(const Posted& posted, uint8_t* out) const;
  void drop_sent_cancels();
  void expect_data(const Posted& posted);

  Client& client_;
  std::deque<Posted> posted_;
  size_t num_sent_ = 0;     // at the front of posted_
  size_t num_awaited_ = 0;  // of these, with an answer to come
  uint64_t bytes_posted_ = 0;
  uint32_t next_id_ = 1;
  Chunk chunk_;  // being received
  uint8_t text_[kMaxText] = {};
};

class Client : public std::enable_shared_from_this<Client> {
 public:
  Client(LinkHost& host, std::shared_ptr<Staging> staging);

  // On the loop.
  void start(const OpRef& op);
  void stop(const OpRef& op);
  void lost_by_peer(uint64_t session, uint64_t number);
  void close(const Status& why);
  void put_fault(const Fault& fault);

  // For its sockets.
  void part_ended(const ClientSocket::Posted& posted, Status status, bool touched);
  void broken(ClientSocket& socket, const Status& why);
  void after_event();

 private:
  struct Slot {
    std::shared_ptr<ClientSocket> socket;
    std::shared_ptr<Dial> dial;
  };
  struct Orphan {
    TransferRef transfer;
    Part part;
  };
  struct Fence {
    std::vector<Orphan> orphans;
    Status why;
  };

  // Sockets.
  uint32_t num_worth() const;
  void open_sockets(bool large);
  void dial(uint32_t slot);
  void dialed(uint32_t slot, std::optional<Dial::Opened> opened, Status why);
  ClientSocket* socket_for(bool large);
  void bury(const std::shared_ptr<ClientSocket>& socket, const Status& why);
  void fenced(uint64_t number, const Status& status);

  // Transfers.
  void enqueue(const TransferRef& transfer);
  void pump(bool patient);  // patient: lets requests gather where answers are about to come
  void post_from(std::deque<TransferRef>& queue, bool large);
  void post_again(const TransferRef& transfer, const Part& part);
  void lose_part(const TransferRef& transfer, Status why);
  void fail_queued(const Status& why);
  void part_resolved(Transfer& transfer);
  void settle(const TransferRef& transfer);
  void end(TransferRef transfer, Status status);
  void deliver();

  LinkHost& host_;
  const std::shared_ptr<Staging> staging_;
  const bool same_host_;
  std::vector<Slot> slots_;
  uint32_t num_worth_;               // of the slots, to large operations between hosts
  std::vector<HostPort> addresses_;  // the one that worked first
  uint64_t next_number_ = 1;
  std::deque<TransferRef> small_, large_;  // with parts to post
  std::map<uint64_t, Fence> fences_;       // by socket number
  // Parts of writes that were given up and may yet be carried out. Until that is known nothing new goes out: it could
  // be overtaken by the old bytes.
  uint64_t ghosts_ = 0;
  std::deque<std::pair<OpRef, Status>> finished_;  // on_done is due
  bool closed_ = false;
};

}  // namespace mr::tcp
