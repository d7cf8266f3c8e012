// One framed, ordered stream between two processes. Before the first frame both sides prove, over this very connection,
// that they know the job's secret: HMAC-SHA256 challenge and response over both hellos (and, on TCP, the TLS exporter).
#pragma once

#include <deque>
#include <memory>

#include "../base/loop.h"
#include "../base/stream.h"
#include "lane.h"

namespace mr {

constexpr uint32_t kMagic = 0x4d44524d;  // "MRDM"
constexpr uint64_t kMaxHelloBytes = 16384;

struct Frame {
  uint16_t type = 0;
  uint64_t id = 0;   // of a request; a kReply carries the request's. 0: no reply wanted
  ByteView payload;  // valid during the call
  std::vector<Fd> fds;
};

class ControlStream : public Loop::Watcher, public std::enable_shared_from_this<ControlStream> {
 public:
  class Handler {
   public:
    virtual void on_up(ControlStream&) {}
    virtual void on_frame(ControlStream& stream, Frame& frame);  // may throw Error: closes the stream. Unexpected here
    // Last call. Ok status: the other side closed it.
    virtual void on_closed(ControlStream& stream, const Status& status) = 0;

   protected:
    ~Handler() = default;
  };

  // `self` is what we tell; the initiator speaks first. Starts with start_on_loop.
  ControlStream(Loop& loop, const Options& options, const PeerInfo& self, Stream stream, bool initiator,
                Handler* handler);
  ~ControlStream();

  void start_on_loop();
  void set_handler_on_loop(Handler* handler) { handler_ = handler; }
  // The payload may come in two pieces.
  void send_on_loop(uint16_t type, uint64_t id, ByteView payload, const Fd* pass_fd = nullptr, ByteView more = {});
  void put_fault_on_loop(const Fault& fault);
  void drain_on_loop();  // takes what has arrived, once the other end is known to send no more
  // Tells the handler, once. With a text the peer is told why.
  void close_on_loop(const Status& status, bool say_why);

  bool has_unsent() const { return !out_.empty(); }
  Time last_read() const { return last_read_; }  // when bytes of the peer last came
  bool up() const { return state_ == State::up; }
  bool closed() const { return state_ == State::closed; }
  const PeerInfo& info() const { return info_; }
  uint64_t session_id() const { return session_id_; }
  const Digest& session_key() const { return session_key_; }

 private:
  enum class State { tls, hello, proof, up, closed };
  struct Out {
    Bytes bytes;
    size_t sent = 0;
    Fd pass;
    uint64_t answer = 0;  // bytes, where it is one
  };
  struct Request {
    uint16_t type;
    uint64_t id;
    Bytes payload;
    std::vector<Fd> fds;
  };

  void on_event(uint32_t events) override;
  void handshake_on_loop();
  bool read_on_loop();  // false: nothing more now
  void parse_on_loop();
  bool carry_out_on_loop(Frame& frame);  // false: it ended the stream
  void on_frame_on_loop(Frame& frame);
  void defer_on_loop(Frame& frame);
  void serve_deferred_on_loop();
  bool may_answer() const;
  bool may_read() const;
  void on_hello_on_loop(Frame& frame);
  void on_hello_reply_on_loop(Frame& frame);
  void on_hello_proof_on_loop(Frame& frame);
  void establish_on_loop(ByteView client, ByteView server);
  void become_up_on_loop();
  void flush_on_loop();
  void come_back_on_loop();
  void want_on_loop();
  void damage_on_loop(uint8_t* head);
  bool silent() const { return fault_ && fault_->silent(); }
  bool mute() const { return fault_ && fault_->mute(); }
  Bytes own_hello() const;
  void read_hello(Reader& in);

  Loop& loop_;
  const Options& options_;
  const PeerInfo& self_;
  Stream stream_;
  const bool initiator_;
  Handler* handler_;
  State state_ = State::tls;
  PeerInfo info_;
  Bytes hello_;  // ours, as sent
  Digest session_key_{};
  uint64_t session_id_ = 0;
  Loop::TimerId deadline_{};
  Bytes in_;
  size_t in_begin_ = 0, in_end_ = 0;
  std::vector<Fd> fds_;
  std::deque<Out> out_;
  std::deque<Request> deferred_;  // until the peer has read answers
  uint64_t answer_bytes_ = 0, deferred_bytes_ = 0;
  Time last_read_{};
  bool watched_ = false;
  uint32_t watching_ = 0;
  std::shared_ptr<FaultySocket> fault_;
  uint32_t damage_ = 0;  // to the next frame that comes; 0: none
};

void encode_info(const PeerInfo& info, Writer& out);
PeerInfo decode_info(Reader& in);

}  // namespace mr
