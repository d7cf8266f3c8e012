// What both ends of a data socket share: heads and payloads in and out of one socket, where payloads go straight
// between the socket and a view of memory, many runs in one system call. Only runs that are too short for that are
// packed.
#pragma once

#include <memory>

#include "lane.h"
#include "tcp_chunks.h"

namespace mr::tcp {

constexpr size_t kReadAhead = 16 << 10;      // behind a head, where more small things may follow
constexpr uint64_t kLargePayload = 8 << 10;  // is worth a system call of its own to come straight to memory
constexpr uint64_t kEventBytes = 1u << 20;   // a socket moves about that much each way before others have their turn

// One per link, used within single calls: nothing stays in it.
struct Staging {
  std::unique_ptr<uint8_t[]> in{new uint8_t[kStagingBytes]}, out{new uint8_t[kStagingBytes]};
};

// A watched socket. The classes derived from it say what heads mean. On the loop.
class Socket : public Loop::Watcher, public std::enable_shared_from_this<Socket> {
 public:
  Socket(LinkHost& host, std::shared_ptr<Staging> staging, Stream stream);
  virtual ~Socket() = default;

  void start();
  void flush();  // sends what there is to send, unless the socket is full
  void close();
  void put_fault(const Fault& fault);
  void give_up(const Status& why);  // close, and on_broken
  bool is_open() const { return open_; }
  double round_trip() const { return tcp_round_trip(stream_.fd()); }

 protected:
  // Incoming. A head is complete once it has head_bytes, which may depend on its beginning; errors are thrown.
  virtual size_t head_bytes(const uint8_t* head, size_t have) const = 0;
  virtual void on_head(const uint8_t* head) = 0;  // may call expect()
  virtual void on_payload() {}                    // some of it has come: payload_left() is still to come
  virtual void on_payload_end() = 0;
  virtual void before_payload() {}        // memory is about to be written
  virtual size_t read_ahead() const = 0;  // how much to ask for behind the payload at hand
  virtual bool wants_to_read() const { return true; }
  // The next `length` bytes go to base + view, from its logical `position` on; or nowhere, where base is null.
  void expect(uint8_t* base, const View& view, uint64_t position, uint64_t length);
  void discard_payload() { payload_base_ = nullptr; }
  uint64_t payload_left() const { return payload_left_; }

  // Outgoing, in order: gather tells what comes next and changes nothing, sent says how much of it has left.
  virtual void gather(Gather& out) = 0;
  virtual void sent(size_t length) = 0;

  virtual void on_broken(const Status& why) = 0;
  virtual void after_event() {}

  LinkHost& host_;

 private:
  void on_event(uint32_t events) override;
  void receive();
  int payload_parts(iovec* parts, uint64_t* bytes) const;
  void feed(const uint8_t* data, size_t length);
  void arrived(uint64_t length);
  void store(const uint8_t* data, size_t length);
  void send_some();
  bool send_sealed(uint64_t* budget);
  void watch_for();
  void come_back();
  bool silent() const { return fault_ && fault_->silent(); }

  const std::shared_ptr<Staging> staging_;
  Stream stream_;
  bool open_ = false;
  bool dry_ = false;      // nothing is left to read just now
  bool blocked_ = false;  // waits for EPOLLOUT
  uint32_t watched_ = 0;
  Bytes sealed_;  // TLS: what has been taken from gather and not yet by the stream
  size_t sealed_sent_ = 0;
  std::shared_ptr<FaultySocket> fault_;

  uint8_t head_[kMaxRequestBytes];
  size_t head_have_ = 0;
  uint8_t* payload_base_ = nullptr;
  Cursor payload_cursor_;
  uint64_t payload_left_ = 0;
  bool payload_packed_ = false;
};

}  // namespace mr::tcp
