// engine.h in terms of the layers below; no other decision.
#include "engine.h"

#include <algorithm>
#include <span>

#include "base/fd.h"
#include "base/json.h"
#include "engine_face.h"
#include "memory/device.h"
#include "transport/device_domain.h"
#include "transport/stream_order.h"
#include "transport/summed_copy.h"
#ifdef MR_VERBS
#include "transport/verbs_describe.h"
#endif

namespace mr {
namespace {

constexpr uint32_t kProtocolVersion = 2;
const char kVersion[] = "0.1.0";

const char* require(const char* text, const char* argument) {
  if (text == nullptr) throw Error(MR_CONFIG, std::string("argument ") + argument + " is NULL");
  return text;
}

// Names are resolved here, in the caller's thread: the loop never waits for a name server.
Address parse_address(const char* text) {
  Address address = Address::parse(require(text, "address"));
  if (address.tcp.port != 0) address.tcp = address.tcp.resolve(0);
  return address;
}

// The memory of a region stays at least until the region is dropped.
struct KeptUntilDrop : Grant {
  KeptUntilDrop(std::shared_ptr<MemoryKeeper> keeper, const Region& region)
      : keeper(std::move(keeper)), base(region.base), size(region.size) {
    this->keeper->keep(base, size);
  }
  bool revoke() override {
    keeper->forget(base, size);
    return true;
  }
  const std::shared_ptr<MemoryKeeper> keeper;
  const void* const base;
  const uint64_t size;
};

}  // namespace

RegionRef make_region(mr_engine& engine, void* address, uint64_t size, uint32_t access, int device) {
  engine.node->check_usable();
  const RegionRef region = engine.node->regions().create(address, size, access, device);
  if (engine.keeper) region->grant("kept", [&] { return std::make_shared<KeptUntilDrop>(engine.keeper, *region); });
  return region;
}

RemoteRegion handle_of(Node& node, const Region& region) {
  RemoteRegion handle = RemoteRegion::of(region);
  handle.owner = node.self().name;
  handle.incarnation = node.self().incarnation;
  handle.address = node.address();
  return handle;
}

}  // namespace mr

using namespace mr;

struct mr_region {
  std::shared_ptr<Node> node;
  RegionRef region;
};

struct mr_remote {
  std::shared_ptr<Node> node;
  std::shared_ptr<const RemoteRegion> region;
  std::shared_ptr<Peer> peer;
  std::shared_ptr<DeviceDomain> devices;
};

struct mr_peer {
  std::shared_ptr<Node> node;
  std::string address;
  std::shared_ptr<Peer> peer;
};

struct mr_inbox {
  std::shared_ptr<Node> node;
};

struct mr_stop {
  Inbox::Stop stop;
};

namespace {

OpRef make_op(Verb verb, double timeout) {
  demand_number(timeout);
  auto op = std::make_shared<Op>();
  op->verb = verb;
  op->submitted = Clock::now();
  op->deadline = deadline_of(op->submitted, timeout);
  return op;
}

void hand_out(OpRef op, mr_op** out) {
  *out = op.get();
  (*out)->held = std::move(op);
}

void demand_right(const RemoteRegion& region, uint32_t right, const char* verb) {
  if ((region.access & right) != right)
    throw Error(MR_ACCESS_DENIED, std::string(verb) + " of region " + std::to_string(region.name.id) + " of " +
                                      region.owner + ", which does not grant it");
}

void demand_inside(const RemoteRegion& region, const View& view) {
  if (!view.fits(region.size))
    throw Error(MR_OUT_OF_BOUNDS, "bytes up to " + std::to_string(view.end()) + " of region " +
                                      std::to_string(region.name.id) + " of " + region.owner + ", which has " +
                                      std::to_string(region.size));
}

void check_transfer(mr_remote* remote, const OpRef& op) {
  demand_right(*remote->region, op->verb == Verb::read ? MR_READ : MR_WRITE, verb_name(op->verb));
  demand_inside(*remote->region, op->remote_view);
  if (op->local == nullptr && op->bytes() != 0)
    throw Error(MR_CONFIG, "argument local is NULL for " + std::to_string(op->bytes()) + " bytes");
  if (op->remote != remote->region) op->remote = remote->region;
}

void start_transfer(mr_remote* remote, const OpRef& op, mr_op** out) {
  check_transfer(remote, op);
  remote->node->submit(remote->peer, op);
  hand_out(op, out);
}

// Lanes of what may end before its call returns. A number tells how such a transfer went: nanoseconds, and the lane.
constexpr const char* kQuickLanes[] = {"local", "shm-mapped", "shm-process_vm", "verbs"};
constexpr int64_t kQuickScale = 8;

// 0 where the lane is none of these.
int64_t told_quickly(const char* lane, std::chrono::nanoseconds took) {
  for (size_t i = 0; i < std::size(kQuickLanes); ++i)
    if (std::strcmp(lane, kQuickLanes[i]) == 0) return took.count() * kQuickScale + static_cast<int64_t>(i + 1);
  return 0;
}

// 0 where there is more to tell.
int64_t told_quickly(const Op& op) {
  const bool plain = op.status().ok() && op.chunks == 1 && op.rails == 1 && op.retries == 0 && op.skipped.empty();
  return plain ? told_quickly(op.lane, op.took()) : 0;
}

bool is_plain(const RemoteRegion& region, uint64_t local, uint32_t flags) {
  return (region.access & MR_READ) != 0 && !region.on_device && local != 0 && (flags & MR_BULK) == 0;
}

// Each thread keeps one operation, so that a transfer which it lets go of before it begins the next allocates nothing.
thread_local OpRef spare_op;

OpRef take_spare_op() { return spare_op ? std::exchange(spare_op, nullptr) : std::make_shared<Op>(); }

void keep_spare_op(OpRef op) {
  const bool moves = op->verb == Verb::read || op->verb == Verb::write;
  const bool plain = moves && !op->on_device() && !op->has_notify && !op->block_sums.wanted();
  if (plain && op->done() && op.use_count() == 1) spare_op = std::move(op);  // else somebody has yet to let go of it
}

// Hands the operation to its peer when the stream has got there, or at its end: then it ends without having begun.
void submit_after(mr_remote* remote, const OpRef& op, std::unique_ptr<StreamMark> mark) {
  const auto ready = [node = remote->node, peer = remote->peer, op,
                      mark = std::shared_ptr<StreamMark>(std::move(mark))](bool ending) {
    Status status = ending ? fail(MR_CANCELLED, "the engine was closed") : Status{};
    const bool late = Clock::now() >= op->deadline;
    if (!mark->is_reached(&status) && !ending && !late && !op->stopping()) return false;
    if (late && !op->stopping()) peer->stop(op, MR_TRANSFER_TIMEOUT);
    try {
      if (!status.ok()) throw Error(status);
      node->submit(peer, op);
    } catch (const Error& error) {
      op->finish(error.status());
    }
    return true;
  };
  if (ready(false)) return;
  op->loop = remote->node->loop_ref();
  op->peer = remote->peer;
  if (!remote->devices->thread().poll(ready))
    throw Error(MR_RESOURCE_EXHAUSTED, "there is no thread to wait for the stream");
}

Verb transfer_verb(uint32_t verb) {
  if (verb != MR_READ && verb != MR_WRITE)
    throw Error(MR_CONFIG, "argument verb = " + std::to_string(verb) + " is neither MR_READ nor MR_WRITE");
  return verb == MR_READ ? Verb::read : Verb::write;
}

OpRef make_transfer(uint32_t verb, void* local, const mr_view& local_view, const mr_view& remote_view, double timeout,
                    uint32_t flags) {
  const auto op = make_op(transfer_verb(verb), timeout);
  op->local = static_cast<uint8_t*>(local);
  op->local_view = View::from(local_view);
  op->remote_view = View::from(remote_view);
  if (op->local_view.bytes() != op->remote_view.bytes())
    throw Error(MR_CONFIG, "the local view has " + std::to_string(op->local_view.bytes()) + " bytes, the remote one " +
                               std::to_string(op->remote_view.bytes()));
  if ((op->verb == Verb::read ? op->local_view : op->remote_view).overlaps_itself())
    throw Error(MR_CONFIG, "the destination's view reaches some bytes twice");
  op->flags = flags;
  return op;
}

void set_notify(Op& op, uint32_t has_notify, uint64_t notify) {
  if (has_notify != 0 && op.verb != Verb::write) throw Error(MR_CONFIG, "argument notify is for writes");
  op.has_notify = has_notify != 0;
  op.notify = notify;
}

void start_atomic(mr_remote* remote, Verb verb, uint64_t offset, uint64_t a, uint64_t b, double timeout, mr_op** out) {
  const auto op = make_op(verb, timeout);
  op->remote_view = View::contiguous(offset, sizeof(uint64_t));
  demand_right(*remote->region, MR_READ | MR_WRITE, verb_name(verb));
  demand_inside(*remote->region, op->remote_view);
  if (remote->region->on_device)
    throw Error(MR_CONFIG, std::string(verb_name(verb)) + " of region " + std::to_string(remote->region->name.id) +
                               " of " + remote->region->owner + ": it is memory of a GPU, which has no remote atomics");
  if ((remote->region->base + offset) % sizeof(uint64_t) != 0)
    throw Error(MR_OUT_OF_BOUNDS, std::string(verb_name(verb)) + " at offset " + std::to_string(offset) +
                                      ", which is not aligned to 8 bytes in the owner's memory");
  op->remote = remote->region;
  op->operand[0] = a;
  op->operand[1] = b;
  remote->node->submit(remote->peer, op);
  hand_out(op, out);
}

// An operation that needs no region: connect, watch, lookup.
OpRef start_plain(Node& node, const char* address, Verb verb, double timeout, std::string name = {}) {
  node.check_usable();
  const auto peer = node.peer_of(parse_address(address));
  const auto op = make_op(verb, timeout);
  op->name = std::move(name);
  op->peer_name = peer->address().name.empty() ? peer->address().tcp.text() : peer->address().name;
  node.submit(peer, op);
  return op;
}

bool is_restartable(const mr_op& op) {
  return (op.verb == Verb::read || op.verb == Verb::write) && !op.on_device() && op.is_let_go();
}

int restart(Node& node, std::span<mr_op* const> ops, double timeout) {
  demand_number(timeout);
  node.check_usable();
  if (!std::all_of(ops.begin(), ops.end(), [](const mr_op* op) { return is_restartable(*op); }))
    throw Error(MR_RESOURCE_EXHAUSTED, "an operation that is to start again has not ended yet");
  const Time now = Clock::now(), until = deadline_of(now, timeout);
  int unfinished = 0;
  for (mr_op* op : ops) {
    auto peer = op->peer.lock();
    if (!peer) peer = node.peer_of(Address::parse(op->remote->address));
    op->rearm(now, until);
    try {
      node.submit(peer, op->held);
    } catch (const Error& error) {  // the others are on their way
      op->finish(error.status());
    }
    unfinished += !op->done() || !op->status().ok();
  }
  return unfinished;
}

void wait_ok(const OpRef& op) {
  op->wait(-1);
  if (!op->status().ok()) throw Error(op->status());
}

}  // namespace

extern "C" {

const char* mr_version(void) { return kVersion; }
uint32_t mr_protocol_version(void) { return kProtocolVersion; }
void mr_options_default(mr_options* options) { *options = Options::defaults(); }

int mr_engine_create(const mr_options* options, mr_engine** engine, mr_error* error) {
  return guarded(error, [&] {
    fill_standard_streams();
    Options checked = Options::from(*options);
    Lanes lanes = make_lanes(checked);
    *engine = new mr_engine{Node::create(std::move(checked), std::move(lanes.types)), std::move(lanes.keeper),
                            std::move(lanes.devices)};
  });
}

void mr_engine_close(mr_engine* engine) {
  if (engine == nullptr) return;
  engine->node->close();
  delete engine;
}

const char* mr_engine_address(mr_engine* engine) { return engine->node->address().c_str(); }
const char* mr_engine_name(mr_engine* engine) { return engine->node->self().name.c_str(); }
uint64_t mr_engine_incarnation(mr_engine* engine) { return engine->node->self().incarnation; }

void* mr_shared_alloc(mr_engine* engine, uint64_t size, mr_error* error) {
  void* address = nullptr;
  guarded(error, [&] {
    engine->node->check_usable();
    address = engine->node->regions().shared_alloc(size);
  });
  return address;
}

int mr_shared_free(mr_engine* engine, void* address, mr_error* error) {
  return guarded(error, [&] { engine->node->shared_free(address); });
}

int mr_region_create(mr_engine* engine, void* address, uint64_t size, uint32_t access, mr_region** region,
                     mr_error* error) {
  return guarded(error, [&] { *region = new mr_region{engine->node, make_region(*engine, address, size, access)}; });
}

int mr_region_create_on_device(mr_engine* engine, void* address, uint64_t size, uint32_t access, mr_region** region,
                               mr_error* error) {
  return guarded(error, [&] {
    engine->node->check_usable();
    const int device = Gpu::need("a region on a device").demand_device("address", address, size);
    *region = new mr_region{engine->node, make_region(*engine, address, size, access, device)};
  });
}

int mr_memory_keep(mr_engine* engine, const void* address, uint64_t size, mr_error* error) {
  return guarded(error, [&] {
    engine->node->check_usable();
    if (engine->keeper) engine->keeper->keep(address, size);
  });
}

void mr_memory_forget(mr_engine* engine, const void* address, uint64_t size) {
  if (engine->keeper && engine->node->is_ours()) engine->keeper->forget(address, size);
}

uint64_t mr_region_descriptor(mr_region* region, uint8_t* out, uint64_t capacity) {
  return copy_out(handle_of(*region->node, *region->region).encode(), out, capacity);
}

uint64_t mr_region_id(mr_region* region) { return region->region->id; }

int mr_region_notification(mr_region* region, double timeout, uint64_t* value, mr_error* error) {
  const int got = region->region->next_notification(timeout, value);
  if (got < 0)
    tell(fail(-got, "notifications of region " + std::to_string(region->region->id) + ": it was dropped"), error);
  return got;
}

void mr_region_notified(mr_region* region, mr_completions* queue, uint64_t tag) {
  region->region->when_notified(queue->weak_from_this(), [queue, tag] { queue->push(tag); });
}

int mr_region_drop(mr_region* region, mr_op** op, mr_error* error) {
  return guarded(error, [&] {
    region->node->check_usable();
    hand_out(region->node->drop(region->region), op);
  });
}

int mr_region_dropped(mr_region* region) { return region->region->quiet.load() ? 1 : 0; }
void mr_region_close(mr_region* region) { delete region; }

int mr_remote_open(mr_engine* engine, const uint8_t* descriptor, uint64_t length, mr_remote** remote, mr_error* error) {
  return guarded(error, [&] {
    engine->node->check_usable();
    auto region = std::make_shared<const RemoteRegion>(RemoteRegion::decode({descriptor, length}));
    const Address address = Address::parse(region->address);
    if (address.incarnation != region->incarnation)
      throw Error(MR_PROTOCOL, "a handle whose address is of another process");
    auto peer = engine->node->peer_of(address);
    *remote = new mr_remote{engine->node, std::move(region), std::move(peer), engine->devices};
  });
}

void mr_remote_close(mr_remote* remote) { delete remote; }
uint64_t mr_remote_size(mr_remote* remote) { return remote->region->size; }
uint32_t mr_remote_access(mr_remote* remote) { return remote->region->access; }
const char* mr_remote_owner(mr_remote* remote) { return remote->region->owner.c_str(); }
uint64_t mr_remote_incarnation(mr_remote* remote) { return remote->region->incarnation; }

const char* mr_remote_lane(mr_remote* remote, double timeout, mr_error* error) {
  static const char* const known[] = {"local", "ipc", "shm-mapped", "shm-process_vm", "verbs", "tcp", "staged"};
  const char* out = "";
  guarded(error, [&] {
    const auto op = make_op(Verb::connect, timeout);
    op->peer_name = remote->region->owner;
    remote->node->submit(remote->peer, op);
    wait_ok(op);
    const std::string lane = remote->peer->lane_name(*remote->region);
    for (const char* name : known)
      if (lane == name) out = name;
    if (*out == 0)
      throw Error(MR_CONFIG,
                  "no lane reaches region " + std::to_string(remote->region->name.id) + " of " + remote->region->owner);
  });
  return out;
}

int mr_transfer(mr_remote* remote, uint32_t verb, void* local, const mr_view* local_view, const mr_view* remote_view,
                double timeout, uint32_t flags, uint32_t has_notify, uint64_t notify, mr_op** out, mr_error* error) {
  return guarded(error, [&] {
    const auto op = make_transfer(verb, local, *local_view, *remote_view, timeout, flags);
    set_notify(*op, has_notify, notify);
    start_transfer(remote, op, out);
  });
}

int mr_transfer_ordered(mr_remote* remote, uint32_t verb, void* local, const mr_view* local_view,
                        const mr_view* remote_view, double timeout, uint32_t flags, uint32_t has_notify,
                        uint64_t notify, const mr_stream_order* order, mr_op** out, mr_error* error) {
  return guarded(error, [&] {
    remote->node->check_usable();
    const auto op = make_transfer(verb, local, *local_view, *remote_view, timeout, flags);
    set_notify(*op, has_notify, notify);
    check_transfer(remote, op);
    const Gpu& gpu = Gpu::need("a transfer in the order of a stream");
    if (order->local_on_device != 0)
      op->local_device =
          gpu.demand_device("local", static_cast<uint8_t*>(local) + op->local_view.offset(),
                            op->local_view.end() - std::min(op->local_view.end(), op->local_view.offset()));
    const int device = order->device >= 0 ? order->device : op->local_device;
    if (device < 0) throw Error(MR_CONFIG, "argument order: its device is -1, but `local` is of no device");
    const auto stream = static_cast<GpuStream>(order->stream);
    auto mark = std::make_unique<StreamMark>(gpu, device, stream);
    if (order->signal != 0) op->gate = StreamGate::shut(gpu, device, stream);
    submit_after(remote, op, std::move(mark));
    hand_out(op, out);
  });
}

int mr_gpu_synchronize(int32_t device, void* stream, mr_error* error) {
  return guarded(error, [&] {
    const Gpu& gpu = Gpu::need("waiting for a stream");
    int current = device;
    if (device < 0) gpu.check(gpu.calls.GetDevice(&current), MR_CONFIG, "GetDevice", "this thread");
    const OnDevice scope(gpu, current);
    gpu.check(gpu.calls.StreamSynchronize(static_cast<GpuStream>(stream)), MR_CONFIG, "StreamSynchronize",
              "a stream of device " + std::to_string(current));
  });
}

int mr_transfer_bytes(mr_remote* remote, uint32_t verb, void* local, uint64_t remote_offset, uint64_t length,
                      double timeout, uint32_t flags, mr_op** out, mr_error* error) {
  return guarded(error, [&] {
    const auto op = make_op(transfer_verb(verb), timeout);
    op->local = static_cast<uint8_t*>(local);
    op->local_view = View::contiguous(0, length);
    op->remote_view = View::contiguous(remote_offset, length);
    op->flags = flags;
    start_transfer(remote, op, out);
  });
}

int mr_read_with_sums(mr_remote* remote, void* local, uint64_t remote_offset, uint64_t length, double timeout,
                      uint32_t flags, const mr_block_sums* sums, mr_op** out, mr_error* error) {
  return guarded(error, [&] {
    check_block_sums(*sums, length);
    const auto op = make_op(Verb::read, timeout);
    op->local = static_cast<uint8_t*>(local);
    op->local_view = View::contiguous(0, length);
    op->remote_view = View::contiguous(remote_offset, length);
    op->flags = flags;
    op->block_sums = BlockSums(*sums);
    op->block_sums.clear(length);
    start_transfer(remote, op, out);
  });
}

int mr_copy_with_sums(mr_engine* engine, void* to, const void* from, uint64_t length, const mr_block_sums* sums,
                      mr_error* error) {
  return guarded(error, [&] {
    check_block_sums(*sums, length);
    copy_with_sums(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), length,
                   copy_threads(engine->node->options()), BlockSums(*sums));
  });
}

int64_t mr_move_bytes(mr_remote* remote, uint32_t verb, uint64_t local, uint64_t remote_offset, uint64_t length,
                      double timeout, uint32_t flags, mr_op** out, mr_error* error) {
  int64_t moved = 0;
  const int kind = guarded(error, [&] {
    demand_number(timeout);
    const Verb checked = transfer_verb(verb);
    const Time now = Clock::now();
    if (checked == Verb::read && remote->peer->reads_now() && is_plain(*remote->region, local, flags))
      if (const char* const lane = remote->node->read_now(
              *remote->peer, *remote->region, reinterpret_cast<uint8_t*>(local), remote_offset, length, flags))
        return void(moved = told_quickly(lane, Clock::now() - now));
    OpRef op = take_spare_op();
    op->rearm(now, deadline_of(now, timeout));
    op->verb = checked;
    op->local = reinterpret_cast<uint8_t*>(local);
    op->local_view = View::contiguous(0, length);
    op->remote_view = View::contiguous(remote_offset, length);
    op->flags = flags;
    check_transfer(remote, op);
    remote->node->submit(remote->peer, op);
    if (op->done()) moved = told_quickly(*op);
    if (moved == 0) return hand_out(std::move(op), out);
    keep_spare_op(std::move(op));
  });
  return kind == MR_OK ? moved : -kind;
}

const char* mr_moved(int64_t moved, double* seconds) {
  const auto lane = static_cast<uint64_t>(moved % kQuickScale - 1);
  *seconds = 1e-9 * static_cast<double>(moved / kQuickScale);
  return moved > 0 && lane < std::size(kQuickLanes) ? kQuickLanes[lane] : "";
}

int mr_fetch_add(mr_remote* remote, uint64_t offset, uint64_t add, double timeout, mr_op** op, mr_error* error) {
  return guarded(error, [&] { start_atomic(remote, Verb::fetch_add, offset, add, 0, timeout, op); });
}

int mr_compare_and_swap(mr_remote* remote, uint64_t offset, uint64_t compare, uint64_t swap, double timeout, mr_op** op,
                        mr_error* error) {
  return guarded(error, [&] { start_atomic(remote, Verb::compare_and_swap, offset, compare, swap, timeout, op); });
}

int mr_remote_drop(mr_remote* remote, double timeout, mr_op** out, mr_error* error) {
  return guarded(error, [&] {
    const auto op = make_op(Verb::drop, timeout);
    op->remote = remote->region;
    remote->node->submit(remote->peer, op);
    hand_out(op, out);
  });
}

int mr_remote_map(mr_remote* remote, double timeout, void** address, uint32_t* writable, mr_error* error) {
  return guarded(error, [&] {
    const auto op = make_op(Verb::map, timeout);
    op->remote = remote->region;
    remote->node->submit(remote->peer, op);
    wait_ok(op);
    *address = op->mapping->address() + remote->region->shared_offset;
    *writable = op->mapping->writable() && (remote->region->access & MR_WRITE) != 0 ? 1 : 0;
    remote->node->keep_mapping(op->mapping, *address);
  });
}

int mr_remote_map_on_device(mr_remote* remote, int32_t device, double timeout, void** address, mr_error* error) {
  return guarded(error, [&] {
    if (!remote->region->on_device)
      throw Error(MR_CONFIG, "region " + std::to_string(remote->region->name.id) + " of " + remote->region->owner +
                                 " is memory of the host, not of a device");
    demand_right(*remote->region, MR_READ | MR_WRITE, "map");
    const Gpu& gpu = Gpu::need("mapping memory of a device");
    if (device < 0) gpu.check(gpu.calls.GetDevice(&device), MR_CONFIG, "GetDevice", "this thread");
    const auto op = make_op(Verb::map, timeout);
    op->remote = remote->region;
    op->local_device = device;
    remote->node->submit(remote->peer, op);
    wait_ok(op);
    *address = op->opened.get();
    remote->node->keep_mapping(op->opened, *address);
  });
}

int mr_remote_unmap(mr_remote* remote, void* address, mr_error* error) {
  return guarded(error, [&] { remote->node->release_mapping(address); });
}

int mr_restart(mr_engine* engine, mr_op* const* ops, uint32_t count, double timeout, mr_error* error) {
  int unfinished = 0;
  const int kind = guarded(error, [&] { unfinished = restart(*engine->node, {ops, count}, timeout); });
  return kind == MR_OK ? unfinished : -kind;
}

int mr_op_wait(mr_op* op, double timeout) { return op->wait(timeout) ? 1 : 0; }
int mr_op_done(mr_op* op) { return op->done() ? 1 : 0; }

void mr_op_cancel(mr_op* op) {
  if (op->done()) return;
  if (const auto peer = op->peer.lock()) peer->stop(op->shared_from_this(), MR_CANCELLED);
}

int mr_op_result(mr_op* op, mr_result* result) {
  if (!op->done()) return MR_CONFIG;
  const Status& status = op->status();
  if (result != nullptr) {
    result->kind = status.kind;
    result->sys_errno = status.sys_errno;
    result->remote_state = op->remote_state;
    result->chunks = op->chunks.load();
    result->rails = op->rails.load();
    result->retries = op->retries.load();
    result->bytes = status.ok() && (op->verb == Verb::read || op->verb == Verb::write) ? op->bytes() : 0;
    result->value = op->value;
    result->seconds = op->seconds();
    put_text(result->lane, sizeof result->lane, op->lane);
    put_text(result->skipped, sizeof result->skipped, op->skipped);
    put_text(result->message, sizeof result->message, status.text);
  }
  return status.kind;
}

void mr_op_release(mr_op* op) {
  if (op != nullptr) keep_spare_op(std::exchange(op->held, nullptr));
}

int mr_completions_create(mr_engine* engine, mr_completions** queue, mr_error* error) {
  return guarded(error, [&] {
    engine->node->check_usable();
    auto made = std::make_shared<mr_completions>(make_eventfd());
    made->held = made;
    *queue = made.get();
  });
}

int mr_completions_fd(mr_completions* queue) { return queue->event.get(); }

int mr_completions_add(mr_completions* queue, mr_op* op, uint64_t tag) {
  return op->attach(queue->shared_from_this(), tag) ? MR_OK : MR_CONFIG;
}

uint64_t mr_completions_take(mr_completions* queue, uint64_t* tags, uint64_t capacity) {
  return queue->take(tags, capacity);
}

void mr_completions_close(mr_completions* queue) {
  if (queue != nullptr) std::exchange(queue->held, nullptr).reset();
}

int mr_connect(mr_engine* engine, const char* address, double timeout, mr_op** op, mr_error* error) {
  return guarded(error, [&] { hand_out(start_plain(*engine->node, address, Verb::connect, timeout), op); });
}

int mr_watch(mr_engine* engine, const char* address, mr_op** op, mr_error* error) {
  return guarded(error, [&] { hand_out(start_plain(*engine->node, address, Verb::watch, -1), op); });
}

int mr_peer_fault(mr_engine* engine, const char* address, uint32_t kind, double seconds, double amount,
                  mr_error* error) {
  return guarded(error, [&] {
    engine->node->check_usable();
    if (kind < MR_FAULT_BREAK || kind > MR_FAULT_CORRUPT)
      throw Error(MR_CONFIG, "argument fault is " + std::to_string(kind) + ", but must be one of enum mr_fault");
    if (!(seconds >= 0) || !(amount >= 0) || (kind == MR_FAULT_SLOW && amount < 1))
      throw Error(MR_CONFIG,
                  "arguments seconds and amount must be numbers from 0 on, and a slow connection still takes "
                  "a byte a second");
    engine->node->put_fault(parse_address(address), {kind, after(std::min(seconds, 1e6)), amount});
  });
}

int mr_publish(mr_engine* engine, const char* name, const uint8_t* data, uint64_t length, mr_error* error) {
  return guarded(error, [&] {
    engine->node->check_usable();
    engine->node->publish(require(name, "name"), Bytes(data, data + length));
  });
}

int mr_unpublish(mr_engine* engine, const char* name, mr_error* error) {
  return guarded(error, [&] { engine->node->unpublish(require(name, "name")); });
}

int mr_lookup(mr_engine* engine, const char* address, const char* name, double timeout, uint8_t* out, uint64_t capacity,
              uint64_t* length, mr_error* error) {
  return guarded(error, [&] {
    const auto node = engine->node;  // the engine may be closed while we wait
    const auto op = start_plain(*node, address, Verb::lookup, timeout, require(name, "name"));
    wait_ok(op);
    *length = copy_out(op->reply, out, capacity);
  });
}

int mr_peer_open(mr_engine* engine, const char* address, mr_peer** peer, mr_error* error) {
  return guarded(error, [&] {
    engine->node->check_usable();
    *peer = new mr_peer{engine->node, require(address, "address"), engine->node->peer_of(parse_address(address))};
  });
}

void mr_peer_close(mr_peer* peer) {
  if (peer != nullptr && peer->node->is_ours()) delete peer;
}

int mr_peer_send(mr_peer* to, const uint8_t* head, uint64_t head_length, const uint8_t* body, uint64_t body_length,
                 double timeout, mr_error* error) {
  return guarded(error, [&] {
    to->node->check_usable();
    demand_number(timeout);
    const Status status = to->peer->send_message({head, head_length}, {body, body_length}, timeout);
    if (status.ok()) return;
    to->node->check_usable();  // it was closed while we waited
    throw Error(Status{status.kind, status.sys_errno,
                       "message of " + std::to_string(head_length + body_length) + " bytes to " +
                           to->peer->address().name + ": " + status.text});
  });
}

int mr_peer_watch(mr_peer* peer, int heartbeats, mr_error* error) {
  return guarded(error, [&] { peer->node->watch(peer->peer, peer->address, heartbeats != 0); });
}

int mr_peer_unwatch(mr_peer* peer, mr_error* error) {
  return guarded(error, [&] {
    peer->node->check_usable();
    peer->peer->unwatch();
  });
}

mr_stop* mr_stop_create(void) { return new (std::nothrow) mr_stop; }
void mr_stop_set(mr_stop* stop) { stop->stop.set(); }
void mr_stop_clear(mr_stop* stop) { stop->stop.clear(); }
int mr_stop_is_set(mr_stop* stop) { return stop->stop.is_set() ? 1 : 0; }
void mr_stop_free(mr_stop* stop) { delete stop; }

int mr_inbox_open(mr_engine* engine, mr_inbox** inbox, mr_error* error) {
  return guarded(error, [&] {
    engine->node->check_usable();
    *inbox = new mr_inbox{engine->node};
  });
}

void mr_inbox_close(mr_inbox* inbox) {
  if (inbox != nullptr && inbox->node->is_ours()) delete inbox;
}

int mr_inbox_take(mr_inbox* inbox, double timeout, mr_stop* stop, uint32_t background, const char** data,
                  uint64_t* length, mr_error* error) {
  int count = 0;
  const int failed = guarded(error, [&] {
    inbox->node->check_usable();
    demand_number(timeout);
    if (stop != nullptr && !stop->stop.is_ours())
      throw Error(MR_CONFIG, "argument stop was made by the parent of this process: after a fork make a new one");
    const Batch* batch = inbox->node->inbox().take(timeout, stop != nullptr ? &stop->stop : nullptr, background != 0);
    if (batch == nullptr) return inbox->node->check_usable();
    *data = reinterpret_cast<const char*>(batch->bytes.data());
    *length = batch->bytes.size();
    count = static_cast<int>(batch->count);
  });
  return failed != MR_OK ? -failed : count;
}

void mr_inbox_done(mr_inbox* inbox, uint32_t put_back) {
  if (inbox->node->is_ours()) inbox->node->inbox().done(put_back != 0);
}

uint64_t mr_engine_counters(mr_engine* engine, char* out, uint64_t capacity) {
  std::string json = "{";
  for (const auto& [name, value] : engine->node->counts())
    json += (json.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(value);
  json += "}";
  if (out != nullptr && capacity > 0) put_text(out, capacity, json);
  return json.size();
}

uint64_t mr_verbs_describe(const char* devices, int32_t gid_index, uint32_t ip_family, char* out, uint64_t capacity) {
  std::string json;
#ifdef MR_VERBS
  mr_error error{};
  const int failed =
      guarded(&error, [&] { json = describe_verbs({require(devices, "devices"), gid_index, ip_family}); });
  if (failed != MR_OK) json = describe_nothing(error.message);
#else
  (void)devices, (void)gid_index, (void)ip_family;
  json = R"({"built": false, "problem": "this build has no verbs lane: there was no header infiniband/verbs.h", )"
         R"("devices": [], "rails": [], "near": []})";
#endif
  if (out != nullptr && capacity > 0) put_text(out, capacity, json);
  return json.size();
}

uint64_t mr_gpu_describe(uint32_t load, char* out, uint64_t capacity) {
  std::string json;
  mr_error error{};
  if (guarded(&error, [&] { json = describe_gpus(load != 0); }) != MR_OK)
    json = json::object({{"problem", json::quoted(error.message)}, {"visible", "{}"}, {"devices", "[]"}});
  if (out != nullptr && capacity > 0) put_text(out, capacity, json);
  return json.size();
}

void mr_message_set_handler(mr_engine* engine, mr_message_handler handler, void* context) {
  engine->node->set_message_handler(handler, context);
}

int mr_message_reply(mr_engine* engine, const uint8_t* data, uint64_t length, mr_error* error) {
  return guarded(error, [&] {
    if (const Status status = engine->node->reply_message({data, length}); !status.ok()) throw Error(status);
  });
}

}  // extern "C"
