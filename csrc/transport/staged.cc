#include "staged.h"

#include "device_lanes.h"

namespace mr {
namespace {

class StagedLink final : public Link {
 public:
  StagedLink(LinkHost& host, const std::shared_ptr<DeviceDomain>& domain)
      : host_(host),
        client_(std::make_shared<StagedClient>(host, domain)),
        server_(std::make_shared<StagedServer>(host, domain)) {}

  const char* lane() const override { return "staged"; }
  const char* lane_for(const RemoteRegion&) const override { return "staged"; }
  bool carries(const Op& op) const override { return op.on_device(); }
  std::string refuses(const Op& op) const override {
    return op.verb == Verb::map ? "memory of a device can't be mapped; read it" : "";
  }
  bool try_inline(const OpRef&) override { return false; }
  void start_on_loop(const OpRef& op) override {
    if (!client_->start_on_loop(op))
      host_.on_done(op, fail(MR_RESOURCE_EXHAUSTED, "there is no thread for device memory"));
  }
  void stop_on_loop(const OpRef& op) override { client_->stop_on_loop(op); }
  void close_on_loop(const Status& why) override {
    client_->close_on_loop(why);
    server_->close_on_loop();
  }
  bool touches(uint64_t region_id) const override { return server_->touches(region_id); }
  void map_on_loop(const OpRef& op) override { host_.on_done(op, fail(kUnavailable, "staged: " + refuses(*op))); }

  void on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds, Reply&) override {
    switch (type) {
      case kStagedSlots:
        return server_->on_slots_on_loop(in);
      case kStagedPack:
      case kStagedUnpack:
        return server_->on_copy_on_loop(type == kStagedPack, in);
      case kStagedAnswer:
        return client_->on_answer_on_loop(in, fds);
      default:
        throw Error(MR_PROTOCOL, "the staged lane knows no frame of type " + std::to_string(type));
    }
  }

 private:
  LinkHost& host_;
  const std::shared_ptr<StagedClient> client_;
  const std::shared_ptr<StagedServer> server_;
};

}  // namespace

std::shared_ptr<Link> make_staged(LinkHost& host, const std::shared_ptr<DeviceDomain>& domain) {
  return std::make_shared<StagedLink>(host, domain);
}

// ---- The link's share of our operations ----

bool StagedClient::start_on_loop(const OpRef& op) {
  if (closing_.is_set()) return host.on_done(op, closing_.why()), true;
  auto transfer = std::make_shared<StagedTransfer>(shared_from_this(), op);
  op->lane_state = transfer;
  return domain->thread().run([self = shared_from_this(), transfer] {
    self->transfers_.insert(transfer);
    transfer->begin();
  });
}

void StagedClient::stop_on_loop(const OpRef& op) {
  domain->thread().run([self = shared_from_this(), op] {
    for (const auto& transfer : std::set(self->transfers_))
      if (transfer->op() == op) transfer->stop();
  });
}

void StagedClient::close_on_loop(const Status& why) {
  if (closing_.is_set()) return;
  closing_.set_on_loop(why);
  requests_.close_on_loop(why);
  domain->thread().run([self = shared_from_this()] {
    for (const auto& transfer : std::set(self->transfers_)) transfer->go_on();
  });
}

void StagedClient::ask(uint16_t type, Bytes question, std::function<void(DeviceAnswer&)> then) {
  loop_.post([self = shared_from_this(), type, question = std::move(question), then = std::move(then)] {
    self->requests_.send_on_loop(type, question, [self, then](DeviceAnswer answer) {
      auto held = std::make_shared<DeviceAnswer>(std::move(answer));
      self->domain->thread().run([then, held] { then(*held); });
    });
  });
}

void StagedClient::ask_for_slots(const OpRef& op, std::function<void(Status)> then) {
  slots_awaited_.push_back(std::move(then));
  if (slots_awaited_.size() > 1) return;
  ask(kStagedSlots, {}, [self = shared_from_this(), owner = op->remote](DeviceAnswer& answer) {
    try {
      if (answer.status.ok()) {
        auto theirs = std::make_shared<RemoteRegion>(RemoteRegion::decode(answer.payload));
        theirs->owner = owner->owner;
        theirs->incarnation = owner->incarnation;
        theirs->address = owner->address;
        if (theirs->on_device || theirs->size < Slots::kBytes || theirs->size > UINT32_MAX)
          throw Error(MR_PROTOCOL, "slots of " + std::to_string(theirs->size) + " bytes");
        self->their_free_ = std::make_unique<Slots>(static_cast<uint32_t>(theirs->size / Slots::kBytes));
        self->theirs_ = std::move(theirs);
      }
    } catch (const Error& error) {
      answer.status = error.status();
    }
    for (const auto& each : std::exchange(self->slots_awaited_, {})) each(answer.status);
  });
}

void StagedClient::ask_for_copy(const OpRef& op, bool pack, int slot, const View& part,
                                std::function<void(Status)> then) {
  Writer out;
  op->remote->name.encode(out);
  out.put(static_cast<uint32_t>(slot));
  part.encode(out);
  ask(pack ? kStagedPack : kStagedUnpack, out.take(),
      [then = std::move(then)](DeviceAnswer& answer) { then(std::move(answer.status)); });
}

}  // namespace mr
