// Opens one data socket: tries the peer's addresses in turn until one leads to a server that proves to be the peer.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lane.h"
#include "tcp_wire.h"

namespace mr::tcp {

class Dial : public Loop::Watcher, public std::enable_shared_from_this<Dial> {
 public:
  struct Opened {
    Stream stream;
    uint64_t session, number;
    HostPort at;
  };
  // Exactly once, perhaps inside start: the socket, or why there is none.
  using Done = std::function<void(std::optional<Opened>, Status)>;

  // Each try takes a number of its own.
  Dial(LinkHost& host, std::vector<HostPort> addresses, uint64_t* next_number, Done done);

  void start();
  void stop();  // then done is not called any more

 private:
  enum class Step { connect, secure, greet, listen };

  void next_address();
  void advance();
  bool step();  // false: waits for the socket
  bool wait_for(Tls::Want want);
  void begin_greeting();
  void check_welcome();
  void failed(const Status& why);
  void note(const Status& why);
  void leave();
  void on_event(uint32_t events) override;

  LinkHost& host_;
  const std::vector<HostPort> addresses_;
  uint64_t* const next_number_;
  Done done_;

  size_t address_ = 0;  // one past the one at hand
  Step step_ = Step::connect;
  std::optional<Stream> stream_;
  uint32_t watched_ = 0;
  Loop::TimerId deadline_{};
  Hello hello_;
  Welcome welcome_;
  size_t moved_ = 0;  // bytes of the hello, then of the welcome
  Status why_;        // of every address tried
};

// Where to look for the peer, best first.
std::vector<HostPort> data_addresses(LinkHost& host);

}  // namespace mr::tcp
