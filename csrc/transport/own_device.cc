// Operations of this process on its own regions, where one end is memory of a device.
#include <map>
#include <mutex>

#include "device_copy.h"
#include "device_lanes.h"
#include "transfer.h"

namespace mr {
namespace {

class OwnDeviceLink final : public Link, public std::enable_shared_from_this<OwnDeviceLink> {
 public:
  OwnDeviceLink(LinkHost& host, std::shared_ptr<DeviceDomain> domain) : host_(host), domain_(std::move(domain)) {}

  const char* lane() const override { return "local"; }
  const char* lane_for(const RemoteRegion&) const override { return "local"; }
  bool carries(const Op& op) const override { return op.on_device(); }
  std::string refuses(const Op& op) const override {
    return op.verb == Verb::map ? "memory of a device can't be mapped" : "";
  }
  bool try_inline(const OpRef&) override { return false; }
  void start_on_loop(const OpRef& op) override {
    op->lane_state = op->peer.lock();
    if (!domain_->thread().run([self = shared_from_this(), op] { self->begin(op); }))
      host_.on_done(op, fail(MR_RESOURCE_EXHAUSTED, "there is no thread for device memory"));
  }
  void stop_on_loop(const OpRef&) override {}  // looked at before each piece
  void close_on_loop(const Status& why) override { closing_.set_on_loop(why); }
  void on_frame_on_loop(uint16_t, Reader&, std::vector<Fd>&, Reply&) override {
    throw Error(MR_PROTOCOL, "there are no frames to oneself");
  }
  bool touches(uint64_t region_id) const override {
    std::lock_guard guard(lock_);
    return users_.count(region_id) != 0;
  }
  void map_on_loop(const OpRef& op) override { host_.on_done(op, fail(kUnavailable, "local: " + refuses(*op))); }

 private:
  void begin(const OpRef& op) {
    const uint64_t id = op->remote->name.id;
    enter(id);  // before the look at the region: a drop sees us, or we see that it was dropped
    try {
      const RegionRef region = host_.regions().find(op->remote->name, op->verb == Verb::read ? MR_READ : MR_WRITE);
      if (reinterpret_cast<uintptr_t>(region->base) != op->remote->base || !op->remote_view.fits(region->size))
        throw Error(MR_ACCESS_DENIED, "the handle's range is not the region's");
      DeviceCopy::Target target;
      target.address = region->base;
      target.device = op->local_device >= 0 ? op->local_device : region->device;
      target.look = [self = shared_from_this(), region] {
        if (self->closing_.is_set()) return self->closing_.why();
        return region->dropped.load() ? fail(MR_ACCESS_DENIED, "the region was dropped") : Status{};
      };
      target.left = [self = shared_from_this(), id] { self->leave(id); };
      DeviceCopy::start(host_, op, domain_, lane(), std::move(target));
    } catch (const Error& error) {
      leave(id);
      host_.on_done(op, error.status());
    }
  }

  void enter(uint64_t id) {
    std::lock_guard guard(lock_);
    ++users_[id];
  }
  void leave(uint64_t id) {
    std::lock_guard guard(lock_);
    if (--users_[id] == 0) users_.erase(id);
  }

  LinkHost& host_;
  const std::shared_ptr<DeviceDomain> domain_;
  Closing closing_;
  mutable std::mutex lock_;
  std::map<uint64_t, int> users_;  // of our regions
};

}  // namespace

std::shared_ptr<Link> make_own_device(LinkHost& host, const std::shared_ptr<DeviceDomain>& domain) {
  return std::make_shared<OwnDeviceLink>(host, domain);
}

}  // namespace mr
