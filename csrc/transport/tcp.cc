#include "tcp_link.h"

namespace mr {
namespace tcp {

TcpLink::TcpLink(LinkHost& host)
    : host_(host),
      has_addresses_(!host.info().tcp.empty()),
      staging_(std::make_shared<Staging>()),
      server_(host, staging_),
      client_(std::make_shared<Client>(host, staging_)) {}

std::string TcpLink::refuses(const Op&) const { return has_addresses_ ? "" : "the peer accepts no data sockets"; }

void TcpLink::close_on_loop(const Status& why) {
  server_.close();
  client_->close(why);
}

void TcpLink::on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>&, Reply&) {
  if (type != kTcpFence && type != kTcpGone) throw Error(MR_PROTOCOL, "unknown tcp frame " + std::to_string(type));
  const auto session = in.get<uint64_t>();
  const auto number = in.get<uint64_t>();
  in.end();
  type == kTcpFence ? server_.fence(session, number) : client_->lost_by_peer(session, number);
}

void TcpLink::put_fault_on_loop(const Fault& fault) {
  server_.put_fault(fault);
  client_->put_fault(fault);
}

void TcpLink::map_on_loop(const OpRef& op) {
  host_.on_done(op, fail(kUnavailable, "tcp: memory of another host can't be mapped"));
}

}  // namespace tcp

std::shared_ptr<Link> make_tcp(LinkHost& host) { return std::make_shared<tcp::TcpLink>(host); }

}  // namespace mr
