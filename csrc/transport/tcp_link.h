// The tcp lane between this process and one peer: our operations on its regions go out on sockets that we opened, the
// peer's operations on ours come in on sockets that it opened.
#pragma once

#include <memory>

#include "lane.h"
#include "tcp_client.h"
#include "tcp_server.h"

namespace mr::tcp {

class TcpLink : public Link {
 public:
  explicit TcpLink(LinkHost& host);

  const char* lane() const override { return "tcp"; }
  std::string refuses(const Op& op) const override;
  bool try_inline(const OpRef&) override { return false; }
  void start_on_loop(const OpRef& op) override { client_->start(op); }
  void stop_on_loop(const OpRef& op) override { client_->stop(op); }
  void close_on_loop(const Status& why) override;
  void on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds, Reply& reply) override;
  // Only the loop is ever in region memory, and a drop is on the loop.
  bool touches(uint64_t) const override { return false; }
  void put_fault_on_loop(const Fault& fault) override;
  void map_on_loop(const OpRef& op) override;
  const char* lane_for(const RemoteRegion&) const override { return "tcp"; }

  Server& server() { return server_; }

 private:
  LinkHost& host_;
  const bool has_addresses_;
  const std::shared_ptr<Staging> staging_;
  Server server_;
  const std::shared_ptr<Client> client_;
};

}  // namespace mr::tcp
