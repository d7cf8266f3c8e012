// The owner's side of the tcp lane: serves the peer's requests on our regions from the sockets it opened.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "tcp_socket.h"

namespace mr::tcp {

class Server;

class ServerSocket final : public Socket {
 public:
  ServerSocket(Server& server, LinkHost& host, std::shared_ptr<Staging> staging, Stream stream)
      : Socket(host, std::move(staging), std::move(stream)), server_(server) {}

 private:
  struct Answer {
    RegionRef region;  // null: just an end
    View view;
    ChunkSender chunks;

    Answer(RegionRef region, const View& view, const Request& request)
        : region(std::move(region)),
          view(view),
          chunks(request.id, this->region->base, this->view, request.begin, request.length) {}
    Answer(uint32_t id, Status end, bool touched) : chunks(id, std::move(end), touched) {}
  };
  struct Write {
    uint32_t id;
    RegionRef region;  // null: refused, its bytes are discarded
    View view;
    uint64_t position, left, length;
    Status refused;
    bool touched = false;
  };

  size_t head_bytes(const uint8_t* head, size_t have) const override;
  void on_head(const uint8_t* head) override;
  void on_payload_end() override {}
  void before_payload() override;
  size_t read_ahead() const override;
  bool wants_to_read() const override;
  void gather(Gather& out) override;
  void sent(size_t length) override;
  void on_broken(const Status& why) override;

  void on_request(const uint8_t* head);
  void on_chunk(const Chunk& chunk);

  Server& server_;
  std::deque<Answer> answers_;
  std::optional<Write> write_;  // being received
  bool streaming_ = false;      // the last request was a large write: another one is likely
};

class Server {
 public:
  Server(LinkHost& host, std::shared_ptr<Staging> staging) : host_(host), staging_(std::move(staging)) {}

  // Takes the number for good: false where it is taken, fenced or too old, or the peer has enough sockets.
  bool claim(uint64_t session, uint64_t number);
  void adopt(uint64_t session, uint64_t number, Stream stream);
  // Afterwards nothing of that socket is carried out any more, even if it has yet to arrive.
  void fence(uint64_t session, uint64_t number);
  void close();
  void put_fault(const Fault& fault);
  void gone(const ServerSocket* socket);

 private:
  struct Numbers {
    std::set<uint64_t> used;
    uint64_t floor = 0;  // all below are used
  };
  using SocketName = std::pair<uint64_t, uint64_t>;  // session, number

  bool use(uint64_t session, uint64_t number);

  LinkHost& host_;
  const std::shared_ptr<Staging> staging_;
  std::map<SocketName, std::shared_ptr<ServerSocket>> sockets_;
  std::map<uint64_t, Numbers> numbers_;  // by session
};

}  // namespace mr::tcp
