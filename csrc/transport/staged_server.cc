#include "staged.h"

namespace mr {
namespace {

// Two copies by a device and two pieces on the wire at a time.
constexpr uint32_t kSlots = 4;

}  // namespace

// Shared with the peer, so that one on this host maps it. Lives until the link and the last copy have gone.
struct StagedServer::OwnerSlots {
  explicit OwnerSlots(RegionTable& regions)
      : regions(regions),
        memory(static_cast<uint8_t*>(regions.shared_alloc(kSlots * Slots::kBytes))),
        pinned(std::make_unique<Pinned>(memory, kSlots * Slots::kBytes)),
        region(regions.create(memory, kSlots * Slots::kBytes, MR_READ | MR_WRITE)) {}
  ~OwnerSlots() {
    regions.end_access(region->id);
    regions.release(region);
    pinned.reset();
    try {
      regions.shared_free(memory);
    } catch (const Error&) {
      // The engine is closing: the table has let go of everything.
      return;
    }
  }

  RegionTable& regions;
  uint8_t* const memory;
  std::unique_ptr<Pinned> pinned;
  const RegionRef region;
};

void StagedServer::on_slots_on_loop(Reader& in) {
  const auto number = in.get<uint64_t>();
  in.end();
  if (!domain_->thread().run([self = shared_from_this(), number] { self->make_slots(number); }))
    answer_on_loop(number, fail(MR_RESOURCE_EXHAUSTED, "the owner has no thread for device memory"), {});
}

void StagedServer::make_slots(uint64_t number) {
  Status status;
  RemoteRegion slots;
  try {
    if (!slots_) slots_ = std::make_shared<OwnerSlots>(host_.regions());
    slots = RemoteRegion::of(*slots_->region);
  } catch (const Error& error) {
    status = error.status();
  }
  loop_.post([self = shared_from_this(), number, status, payload = slots.encode()] {
    self->answer_on_loop(number, status, status.ok() ? payload : Bytes{});
  });
}

void StagedServer::on_copy_on_loop(bool pack, Reader& in) {
  const auto number = in.get<uint64_t>();
  const RegionName name = RegionName::decode(in);
  const auto slot = in.get<uint32_t>();
  const View view = View::decode(in);
  in.end();
  RegionRef region;
  try {
    region = host_.regions().find(name, pack ? MR_READ : MR_WRITE);
    if (region->device < 0 || slot >= kSlots || view.bytes() > Slots::kBytes)
      throw Error(MR_PROTOCOL, "slot " + std::to_string(slot) + " and " + std::to_string(view.bytes()) +
                                   " bytes of region " + std::to_string(name.id));
    if (!view.fits(region->size))
      throw Error(MR_OUT_OF_BOUNDS, "bytes up to " + std::to_string(view.end()) + " of region " +
                                        std::to_string(name.id) + ", which has " + std::to_string(region->size));
  } catch (const Error& error) {
    return answer_on_loop(number, error.status(), {});
  }
  {
    std::lock_guard guard(lock_);
    ++users_[region->id];
  }
  if (!domain_->thread().run([self = shared_from_this(), region, view, slot, pack, number] {
        self->copy(region, view, slot, pack, number);
      }))
    copied_on_loop(region, number, fail(MR_RESOURCE_EXHAUSTED, "the owner has no thread for device memory"));
}

void StagedServer::copy(const RegionRef& region, const View& view, uint32_t slot, bool pack, uint64_t number) {
  const auto slots = slots_;
  const auto done = [self = shared_from_this(), slots, region, number](Status status) {
    self->loop_.post([self, region, number, status] { self->copied_on_loop(region, number, status); });
  };
  if (!slots) return done(fail(MR_PROTOCOL, "a slot that was never asked for"));
  const View whole = View::contiguous(slot * Slots::kBytes, view.bytes());
  DeviceDomain::Side here{slots->memory, Cursor(whole)}, there{region->base, Cursor(view)};
  domain_->copy(region->device, pack ? here : there, pack ? there : here, view.bytes(), done);
}

void StagedServer::copied_on_loop(const RegionRef& region, uint64_t number, Status status) {
  {
    std::lock_guard guard(lock_);
    if (--users_[region->id] == 0) users_.erase(region->id);
  }
  if (status.ok() && region->dropped.load()) status = fail(MR_ACCESS_DENIED, "the region was dropped");
  answer_on_loop(number, status, {});
}

void StagedServer::answer_on_loop(uint64_t number, const Status& status, const Bytes& payload) {
  if (!closed_) host_.send_on_loop(kStagedAnswer, DeviceRequests::encode(number, status, payload));
}

bool StagedServer::touches(uint64_t region_id) const {
  std::lock_guard guard(lock_);
  return users_.count(region_id) != 0;
}

}  // namespace mr
