// Tries the ways to reach an engine, best first, until one leads to a control stream with the right process behind it.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "address.h"
#include "control.h"

namespace mr {

class Dialer : public Loop::Watcher, public ControlStream::Handler, public std::enable_shared_from_this<Dialer> {
 public:
  // Exactly once: a stream that is up (set its handler), or null and why. On the loop.
  using Done = std::function<void(std::shared_ptr<ControlStream>, Status)>;

  Dialer(Loop& loop, const Options& options, const PeerInfo& self, Address to, Done done);
  void start_on_loop();
  void stop_on_loop(const Status& why);

 private:
  struct Way {
    std::string unix_name;  // "": over TCP
    HostPort tcp;
    std::string text() const { return unix_name.empty() ? "tcp:" + tcp.text() : "unix:" + unix_name; }
  };

  void next_on_loop();
  void failed_on_loop(const Status& status);
  void finish_on_loop(std::shared_ptr<ControlStream> stream, const Status& status);
  void begin_stream_on_loop();
  void on_event(uint32_t events) override;
  void on_up(ControlStream& stream) override;
  void on_closed(ControlStream& stream, const Status& status) override;

  Loop& loop_;
  const Options& options_;
  const PeerInfo& self_;
  const Address to_;
  Done done_;
  std::vector<Way> ways_;
  size_t way_ = 0;
  Time until_{};  // then no further way is tried
  Fd connecting_;
  Loop::TimerId deadline_{};
  std::shared_ptr<ControlStream> stream_;
  Status worst_;
};

}  // namespace mr
