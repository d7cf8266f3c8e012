#include "verbs_lane.h"

#include "verbs_client.h"
#include "verbs_server.h"

namespace mr {
namespace {

// Our operations on the peer's regions go out on queue pairs that we asked for, the peer's on ours come in on queue
// pairs that it asked for.
class VerbsLink : public Link {
 public:
  VerbsLink(LinkHost& host, const std::shared_ptr<VerbsDomain>& domain)
      : host_(host),
        client_(std::make_shared<VerbsClient>(host, domain)),
        server_(std::make_shared<VerbsServer>(host, domain)) {
    domain->listen(client_);
    domain->listen(server_);
  }

  const char* lane() const override { return "verbs"; }
  bool carries(const Op&) const override { return true; }  // cards reach memory of devices, too
  std::string refuses(const Op& op) const override { return client_->refuses(op); }
  bool try_inline(const OpRef& op) override { return client_->try_inline(op); }
  void start_on_loop(const OpRef& op) override { client_->start(op); }
  void stop_on_loop(const OpRef& op) override { client_->stop(op); }
  void stop_inline_on_loop(int kind) override { client_->stop_inline(kind); }
  void close_on_loop(const Status& why) override {
    client_->close(why);
    server_->close();
  }
  void abandon_on_loop() override { client_->abandon(); }
  void on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds, Reply& reply) override;
  // Cards come and go without a word. What keeps a drop waiting is the region's grant.
  bool touches(uint64_t) const override { return false; }
  void map_on_loop(const OpRef& op) override {
    host_.on_done(op, fail(kUnavailable, "verbs: memory of another host can't be mapped"));
  }
  const char* lane_for(const RemoteRegion&) const override { return "verbs"; }

 private:
  LinkHost& host_;
  const std::shared_ptr<VerbsClient> client_;
  const std::shared_ptr<VerbsServer> server_;
};

void VerbsLink::on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>&, Reply&) {
  switch (type) {
    case kVerbsAsk:
      in.end();
      return server_->on_ask();
    case kVerbsRails:
      return client_->on_rails(decode_rails(in));
    case kVerbsOffer:
      return server_->on_offer(VerbsOffer::decode(in));
    case kVerbsAccept:
      return client_->on_accept(VerbsAccept::decode(in));
    case kVerbsWant:
      return server_->on_want(VerbsWant::decode(in));
    case kVerbsKeys:
      return client_->on_keys(VerbsKeys::decode(in));
    case kVerbsFence:
    case kVerbsFenced:
    case kVerbsGone: {
      const auto number = in.get<uint64_t>();
      in.end();
      return type == kVerbsFence    ? server_->on_fence(number)
             : type == kVerbsFenced ? client_->on_fenced(number)
                                    : client_->on_gone(number);
    }
    default:
      throw Error(MR_PROTOCOL, "unknown verbs frame " + std::to_string(type));
  }
}

}  // namespace

std::shared_ptr<Link> make_verbs(LinkHost& host, const std::shared_ptr<VerbsDomain>& domain) {
  return std::make_shared<VerbsLink>(host, domain);
}

}  // namespace mr
