// The ipc lane: memory of a device of this host that another process owns. The owner exports the allocations that the
// region lies in; we open them, and a device copies. Between them, one way each:
//   reader -> owner  map: a region, and where in it the piece begins that is asked for
//   owner -> reader  answer: a piece, its descriptor where it has one; or why not
//   owner -> reader  gone: the region was dropped
//   reader -> owner  left: nothing of that mapping is used any more; the drop waits for it
#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "../memory/device_ipc.h"
#include "device_copy.h"
#include "device_lanes.h"
#include "device_wire.h"
#include "transfer.h"

namespace mr {
namespace {

constexpr size_t kMaxPieces = 1u << 16;

// What every engine of this process says: its memory needs no opening here.
uint64_t process_token() {
  static const uint64_t token = random_u64();
  return token;
}

// Which links have one of our regions open. Thread safe.
class IpcGrant final : public Grant {
 public:
  // tell: that the region is gone.
  void enter(const void* link, const std::function<void()>& tell) {
    std::lock_guard guard(lock_);
    auto& reader = readers_[link];
    ++reader.times;
    reader.tell = tell;
  }
  // True once the link has it open no more.
  bool leave(const void* link, bool for_good) {
    std::lock_guard guard(lock_);
    const auto found = readers_.find(link);
    if (found == readers_.end()) return true;
    if (!for_good && --found->second.times > 0) return false;
    readers_.erase(found);
    return true;
  }
  bool revoke() override {
    std::lock_guard guard(lock_);
    for (auto& [link, reader] : readers_)
      if (reader.tell) std::exchange(reader.tell, nullptr)();
    return readers_.empty();
  }

 private:
  struct Reader {
    int times = 0;
    std::function<void()> tell;
  };
  std::mutex lock_;
  std::map<const void*, Reader> readers_;
};

// What a handle names, all of it: who holds only a part of the truth opens nothing. And the device that it is opened
// for, whose kernels use it; -1: the owner's, which copies.
struct PeerRegion {
  std::array<uint64_t, 4> handle;
  int opener;
  uint64_t id() const { return handle[0]; }
  auto operator<=>(const PeerRegion&) const = default;
};
PeerRegion region_of(const Op& op) {
  const RemoteRegion& remote = *op.remote;
  return {{remote.name.id, remote.name.key.word[0], remote.name.key.word[1], remote.access},
          op.verb == Verb::map ? op.local_device : -1};
}

// The peer's region as it is reached from here. On the domain's thread.
struct PeerMemory {
  enum class Phase { asking, open, refused } phase = Phase::asking;
  std::string refusal;
  bool granted = false, gone = false;  // the owner waits for us to leave; the region was dropped
  int users = 0;
  uint64_t base = 0, size = 0;  // in the owner's process
  std::string pci;              // of the owner's device
  int device = -1;              // the same one here
  std::vector<ExportedPiece> pieces;
  std::shared_ptr<OpenedMemory> opened;  // null within one process
  uint8_t* address = nullptr;
  std::vector<OpRef> waiting;
};
using PeerMemoryRef = std::shared_ptr<PeerMemory>;

Status out_of_reach(int device, const PeerMemory& memory) {
  return fail(kUnavailable, "device " + std::to_string(device) + " can't reach memory of device " +
                                std::to_string(memory.device) + " (" + memory.pci + ")");
}

class IpcLink final : public Link, public std::enable_shared_from_this<IpcLink> {
 public:
  IpcLink(LinkHost& host, std::shared_ptr<DeviceDomain> domain)
      : host_(host), domain_(std::move(domain)), requests_(host) {}

  const char* lane() const override { return "ipc"; }
  const char* lane_for(const RemoteRegion&) const override { return "ipc"; }
  bool carries(const Op& op) const override { return op.remote && op.remote->on_device; }
  std::string refuses(const Op& op) const override {
    return op.verb == Verb::map && op.local_device < 0 ? "memory of a device can't be mapped; read it" : "";
  }
  bool try_inline(const OpRef&) override { return false; }
  void start_on_loop(const OpRef& op) override;
  void stop_on_loop(const OpRef& op) override;
  void close_on_loop(const Status& why) override;
  void on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds, Reply& reply) override;
  bool touches(uint64_t) const override { return false; }            // the grant keeps a drop waiting
  void map_on_loop(const OpRef& op) override { start_on_loop(op); }  // for a device

 private:
  // Ours. On the domain's thread.
  void begin(const OpRef& op);
  void ask(const PeerRegion& region, const RemoteRegion& remote, const PeerMemoryRef& memory);
  void answered(const PeerRegion& region, const RemoteRegion& remote, const PeerMemoryRef& memory,
                DeviceAnswer& answer);
  bool take_piece(const RemoteRegion& remote, PeerMemory& memory, DeviceAnswer& answer);
  void open(const PeerRegion& region, PeerMemory& memory);
  void settle(const PeerRegion& region, const PeerMemoryRef& memory, const Status& status);
  void use(const OpRef& op, const PeerRegion& region, const PeerMemoryRef& memory);
  void copy(const OpRef& op, const PeerRegion& region, const PeerMemoryRef& memory);
  void hand_out(const OpRef& op, const PeerRegion& region, const PeerMemoryRef& memory);
  void leave(const PeerRegion& region, const PeerMemoryRef& memory);
  void gone(uint64_t region_id);
  void let_go(const PeerRegion& region, const PeerMemoryRef& memory);
  void tell_left(const PeerRegion& region);
  // The peer's.
  void serve_map_on_loop(Reader& in);
  void export_piece_of(const RegionRef& region, uint64_t offset, uint64_t number);
  void answer_on_loop(uint64_t number, const Status& status, const Bytes& payload, const Fd& fd);
  bool granted_on_loop(const RegionRef& region);

  template <typename Work>
  void on_loop(Work work) {
    loop_.post([self = shared_from_this(), work = std::move(work)] {
      if (!self->closing_.is_set()) work();
    });
  }
  LinkHost& host_;
  Loop& loop_ = host_.loop();
  const std::shared_ptr<DeviceDomain> domain_;
  DeviceRequests requests_;
  Closing closing_;
  std::map<PeerRegion, PeerMemoryRef> memories_;           // on the domain's thread
  std::map<uint64_t, std::shared_ptr<IpcGrant>> granted_;  // on the loop: regions of ours that the peer has open
};

// ---- Our operations ----

void IpcLink::start_on_loop(const OpRef& op) {
  if (closing_.is_set()) return host_.on_done(op, closing_.why());
  op->lane_state = op->peer.lock();  // stays until the end is told
  if (!domain_->thread().run([self = shared_from_this(), op] { self->begin(op); }))
    host_.on_done(op, fail(kUnavailable, "ipc: there is no thread for device memory"));
}

void IpcLink::stop_on_loop(const OpRef& op) {
  domain_->thread().run([self = shared_from_this(), op] {
    for (auto& [region, memory] : self->memories_)
      if (std::erase(memory->waiting, op) != 0)
        self->host_.on_done(op, fail(op->stop_kind, "it was stopped while it waited for the peer"));
  });
}

void IpcLink::close_on_loop(const Status& why) {
  if (closing_.is_set()) return;
  closing_.set_on_loop(why);
  for (const auto& [id, grant] : std::exchange(granted_, {})) grant->leave(this, true);
  domain_->thread().run([self = shared_from_this(), why] {
    for (auto& [region, memory] : std::exchange(self->memories_, {}))
      for (const auto& op : std::exchange(memory->waiting, {})) self->host_.on_done(op, why);
  });
  requests_.close_on_loop(why);
}

void IpcLink::begin(const OpRef& op) {
  if (closing_.is_set()) return host_.on_done(op, closing_.why());
  const PeerRegion region = region_of(*op);
  PeerMemoryRef& memory = memories_[region];
  if (!memory) {
    memory = std::make_shared<PeerMemory>();
    memory->waiting.push_back(op);
    return ask(region, *op->remote, memory);
  }
  switch (memory->phase) {
    case PeerMemory::Phase::asking:
      return memory->waiting.push_back(op);
    case PeerMemory::Phase::refused:
      return host_.on_done(op, fail(kUnavailable, "ipc: " + memory->refusal));
    case PeerMemory::Phase::open:
      return use(op, region, memory);
  }
}

void IpcLink::ask(const PeerRegion& region, const RemoteRegion& remote, const PeerMemoryRef& memory) {
  uint64_t offset = 0;
  if (!memory->pieces.empty()) offset = memory->pieces.back().base + memory->pieces.back().size - memory->base;
  Writer out;
  remote.name.encode(out);
  out.put(remote.access).put(offset);
  loop_.post([self = shared_from_this(), region, remote, memory, question = out.take()] {
    self->requests_.send_on_loop(kIpcMap, question, [self, region, remote, memory](DeviceAnswer answer) {
      auto held = std::make_shared<DeviceAnswer>(std::move(answer));
      self->domain_->thread().run(
          [self, region, remote, memory, held] { self->answered(region, remote, memory, *held); });
    });
  });
}

void IpcLink::answered(const PeerRegion& region, const RemoteRegion& remote, const PeerMemoryRef& memory,
                       DeviceAnswer& answer) {
  Status status = std::move(answer.status);
  try {
    if (status.ok()) {
      memory->granted = true;
      if (!take_piece(remote, *memory, answer)) return ask(region, remote, memory);
      open(region, *memory);
    }
  } catch (const Error& error) {
    status = error.status();
    if (status.kind != MR_PROTOCOL) status.kind = kUnavailable;
  }
  settle(region, memory, status);
}

// True once there is all that is needed.
bool IpcLink::take_piece(const RemoteRegion& remote, PeerMemory& memory, DeviceAnswer& answer) {
  Reader in(answer.payload);
  const auto token = in.get<uint64_t>();
  memory.base = in.get<uint64_t>();
  memory.size = in.get<uint64_t>();
  memory.device = in.get<int32_t>();
  memory.pci = in.text(kMaxDeviceText);
  if (memory.size != remote.size) throw Error(MR_PROTOCOL, "the handle's range is not the region's");
  if (token == process_token()) {
    memory.address = reinterpret_cast<uint8_t*>(memory.base);
    return true;
  }
  ExportedPiece piece = ExportedPiece::decode(in);
  const uint64_t begin = memory.pieces.empty() ? memory.base : memory.pieces.back().base + memory.pieces.back().size;
  const bool fits = piece.base <= begin && piece.size > begin - piece.base && piece.size <= UINT64_MAX - piece.base &&
                    piece.by_fd == answer.fd.valid() && memory.pieces.size() < kMaxPieces;
  if (!fits) throw Error(MR_PROTOCOL, "a piece that is not of the region");
  if (!memory.pieces.empty() && !(piece.base == begin && piece.by_fd && memory.pieces.front().by_fd))
    throw Error(MR_REGISTRATION, "the region lies in several allocations");
  piece.fd = std::move(answer.fd);
  memory.pieces.push_back(std::move(piece));
  return memory.pieces.back().base + memory.pieces.back().size >= memory.base + std::max<uint64_t>(memory.size, 1);
}

void IpcLink::open(const PeerRegion& region, PeerMemory& memory) {
  const Gpu& gpu = Gpu::need("opening memory of the peer's device");
  const bool ours = memory.address != nullptr;  // within this process
  if (!ours) memory.device = gpu.at_pci(memory.pci);
  if (memory.device < 0) throw Error(MR_CONFIG, "the owner's device " + memory.pci + " is not visible in this process");
  const int opener = region.opener >= 0 ? region.opener : memory.device;
  if (!gpu.reaches(opener, memory.device)) throw Error(out_of_reach(opener, memory));
  if (ours) return;
  memory.opened = open_pieces(gpu, opener, memory.pieces);
  memory.address = memory.opened->address() + (memory.base - memory.pieces.front().base);
  memory.pieces.clear();  // and their descriptors
}

void IpcLink::settle(const PeerRegion& region, const PeerMemoryRef& memory, const Status& status) {
  const auto waiting = std::exchange(memory->waiting, {});
  if (status.ok()) {
    memory->phase = PeerMemory::Phase::open;
    for (const auto& op : waiting) use(op, region, memory);
    if (memory->gone && memory->users == 0) let_go(region, memory);
    return;
  }
  if (std::exchange(memory->granted, false)) tell_left(region);
  if (status.kind == kUnavailable && !memory->gone) {
    memory->phase = PeerMemory::Phase::refused;
    memory->refusal = status.text;
    memory->pieces.clear();
  } else if (const auto found = memories_.find(region); found != memories_.end() && found->second == memory) {
    memories_.erase(found);
  }
  Status why = status;
  if (why.kind == kUnavailable) why.text = "ipc: " + why.text;
  for (const auto& op : waiting) host_.on_done(op, why);
}

void IpcLink::use(const OpRef& op, const PeerRegion& region, const PeerMemoryRef& memory) {
  if (closing_.is_set()) return host_.on_done(op, closing_.why());
  if (memory->gone) return host_.on_done(op, fail(MR_ACCESS_DENIED, "the region was dropped"));
  op->verb == Verb::map ? hand_out(op, region, memory) : copy(op, region, memory);
}

// The region's address here. Who has it is in the memory like a copy, until it lets go of it, on any thread.
void IpcLink::hand_out(const OpRef& op, const PeerRegion& region, const PeerMemoryRef& memory) {
  ++memory->users;
  op->lane = lane();
  op->opened = std::shared_ptr<uint8_t>(memory->address, [self = shared_from_this(), region, memory](uint8_t*) {
    self->domain_->thread().run([self, region, memory] { self->leave(region, memory); });
  });
  host_.on_done(op, {});
}

void IpcLink::leave(const PeerRegion& region, const PeerMemoryRef& memory) {
  if (--memory->users == 0 && memory->gone) let_go(region, memory);
}

void IpcLink::copy(const OpRef& op, const PeerRegion& region, const PeerMemoryRef& memory) {
  if (!op->remote_view.fits(memory->size)) return host_.on_done(op, fail(MR_OUT_OF_BOUNDS, "it leaves the region"));
  const int here = op->local_device;
  if (here >= 0 && !Gpu::need("a copy between devices").reaches(here, memory->device))
    return host_.on_done(op, fail(kUnavailable, "ipc: " + out_of_reach(here, *memory).text));
  DeviceCopy::Target target;
  target.address = memory->address;
  target.device = here >= 0 ? here : memory->device;
  target.look = [self = shared_from_this(), memory] {
    if (self->closing_.is_set()) return self->closing_.why();
    return memory->gone ? fail(MR_ACCESS_DENIED, "the region was dropped") : Status{};
  };
  target.left = [self = shared_from_this(), region, memory] { self->leave(region, memory); };
  ++memory->users;
  DeviceCopy::start(host_, op, domain_, lane(), std::move(target));
}

void IpcLink::gone(uint64_t region_id) {
  for (auto at = memories_.begin(); at != memories_.end();) {
    const auto [region, memory] = *at++;
    if (region.id() != region_id) continue;
    memory->gone = true;
    if (memory->phase == PeerMemory::Phase::refused) memories_.erase(region);
    if (memory->phase == PeerMemory::Phase::open && memory->users == 0) let_go(region, memory);
  }
}

// Closes it, before the owner hears that nobody is in it.
void IpcLink::let_go(const PeerRegion& region, const PeerMemoryRef& memory) {
  memory->opened.reset();
  memories_.erase(region);
  tell_left(region);
}

void IpcLink::tell_left(const PeerRegion& region) {
  on_loop([this, id = region.id()] { host_.send_on_loop(kIpcLeft, Writer().put(id).take()); });
}

// ---- Frames ----

void IpcLink::on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds, Reply&) {
  switch (type) {
    case kIpcMap:
      return serve_map_on_loop(in);
    case kIpcAnswer:
      return requests_.on_answer_on_loop(in, fds);
    case kIpcGone: {
      const auto id = in.get<uint64_t>();
      in.end();
      domain_->thread().run([self = shared_from_this(), id] { self->gone(id); });
      return;
    }
    case kIpcLeft: {
      const auto id = in.get<uint64_t>();
      in.end();
      if (const auto found = granted_.find(id); found != granted_.end() && found->second->leave(this, false))
        granted_.erase(found);
      return;
    }
    default:
      throw Error(MR_PROTOCOL, "the ipc lane knows no frame of type " + std::to_string(type));
  }
}

void IpcLink::serve_map_on_loop(Reader& in) {
  const auto number = in.get<uint64_t>();
  const RegionName name = RegionName::decode(in);
  const auto access = in.get<uint32_t>();
  const auto offset = in.get<uint64_t>();
  in.end();
  try {
    const RegionRef region = host_.regions().find(name, access);
    if (region->device < 0 || offset > region->size)
      throw Error(MR_ACCESS_DENIED, "region " + std::to_string(name.id) + " is not memory of a device, or ends before");
    if (!domain_->thread().run(
            [self = shared_from_this(), region, offset, number] { self->export_piece_of(region, offset, number); }))
      throw Error(kUnavailable, "the owner has no thread for device memory");
  } catch (const Error& error) {
    answer_on_loop(number, error.status(), {}, {});
  }
}

void IpcLink::export_piece_of(const RegionRef& region, uint64_t offset, uint64_t number) {
  auto piece = std::make_shared<ExportedPiece>();
  Status status;
  Writer out;
  try {
    const Gpu& gpu = Gpu::need("exporting device memory");
    *piece = export_piece(gpu, region->base + offset);
    out.put(process_token()).put(reinterpret_cast<uint64_t>(region->base)).put(region->size);
    out.put(static_cast<int32_t>(region->device)).text(gpu.pci(region->device));
    piece->encode(out);
  } catch (const Error& error) {
    status = fail(kUnavailable, "the owner can't export it: " + error.status().text);
  }
  on_loop([this, region, offset, number, piece, status, payload = out.take()] {
    Status answer = status;
    if (status.ok() && offset == 0 && !granted_on_loop(region))
      answer = fail(MR_ACCESS_DENIED, "the region was dropped");
    answer_on_loop(number, answer, answer.ok() ? payload : Bytes{}, piece->fd);
  });
}

// False once it is dropped.
bool IpcLink::granted_on_loop(const RegionRef& region) {
  const auto grant =
      std::static_pointer_cast<IpcGrant>(region->grant(lane(), [] { return std::make_shared<IpcGrant>(); }));
  if (!grant) return false;
  granted_[region->id] = grant;
  grant->enter(this, [weak = weak_from_this(), id = region->id] {
    if (const auto self = weak.lock())
      self->on_loop([link = self.get(), id] { link->host_.send_on_loop(kIpcGone, Writer().put(id).take()); });
  });
  return true;
}

void IpcLink::answer_on_loop(uint64_t number, const Status& status, const Bytes& payload, const Fd& fd) {
  host_.send_on_loop(kIpcAnswer, DeviceRequests::encode(number, status, payload), fd.valid() ? &fd : nullptr);
}

}  // namespace

std::shared_ptr<Link> make_ipc(LinkHost& host, const std::shared_ptr<DeviceDomain>& domain) {
  if (!host.info().over_unix) return nullptr;  // another host, or no way to pass descriptors
  return std::make_shared<IpcLink>(host, domain);
}

}  // namespace mr
