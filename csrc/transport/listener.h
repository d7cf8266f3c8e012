// The doors of an engine: accepts control streams on a Unix socket and on TCP (TLS), and data sockets on TCP. Who does
// not prove membership in time is shown out; a bounded number may stand at the door.
#pragma once

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "control.h"
#include "socket_file.h"
#include "strangers.h"

namespace mr {

class Listener : public ControlStream::Handler {
 public:
  using Arrived = std::function<void(std::shared_ptr<ControlStream>)>;

  // Binds; throws MR_CONFIG or MR_RESOURCE_EXHAUSTED where it can't. Fills in where it listens.
  Listener(Loop& loop, const Options& options, const PeerInfo& self, Strangers& strangers);
  ~Listener();

  const std::string& unix_name() const { return unix_name_; }
  const HostPort& control_at() const { return control_at_; }  // as advertised
  const HostPort& data_at() const { return data_at_; }

  void start_on_loop(Arrived arrived, DataDoor::Find find);
  void close_on_loop();

 private:
  struct Door;
  struct Greeting {
    std::shared_ptr<ControlStream> stream;
    const Door* door;
    Time since;
    std::string from;  // "" on this host
  };

  void accept_on_loop(Door& door);
  bool make_room_on_loop(const Door& door);
  void pause_on_loop(Door& door, double seconds);
  void on_up(ControlStream& stream) override;
  void on_closed(ControlStream& stream, const Status& status) override;

  Loop& loop_;
  const Options& options_;
  const PeerInfo& self_;
  Strangers& strangers_;
  Arrived arrived_;
  std::unique_ptr<DataDoor> data_door_;
  std::vector<std::unique_ptr<Door>> doors_;
  std::unordered_map<ControlStream*, Greeting> greeting_;
  std::string unix_name_;
  std::unique_ptr<SocketFile> socket_file_;
  HostPort control_at_, data_at_;
};

}  // namespace mr
