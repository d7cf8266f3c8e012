// The shm lane: memory of a process on this host, reached by our own threads. Memory from shared_alloc is mapped and
// copied (shm-mapped); other memory is copied by the kernel (shm-process_vm).
//
// How the two sides get to know each other, each for its own operations, by kShmOffer frames:
//   reader -> owner  ledger: where the reader will write down what it touches
//   owner -> reader  board: which regions live, and where on it the signs are that the owner's process lives and keeps
//                    the link. It comes after the owner has mapped the ledger, so no access is without an entry that
//                    the owner can see.
//   owner -> reader  refused, with the reason, instead
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "bulk_copy.h"
#include "shm_board.h"
#include "shm_mappings.h"
#include "shm_process.h"
#include "transfer.h"

namespace mr {
namespace {

// What the caller's thread does at once: at most about 100 us; handing it to another thread costs 10 to 20.
constexpr uint64_t kInline = 1u << 20;
constexpr size_t kMaxReason = 1024;

enum class Offer : uint8_t { ledger = 1, board = 2, refused = 3 };

// A descriptor of the same memory that can't be written through, or as good as it gets.
Fd read_only(int fd) {
  Fd out = reopen_read_only(fd);
  return out.valid() ? std::move(out) : Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

class ShmTransfer;

class ShmLink final : public Link, public std::enable_shared_from_this<ShmLink> {
 public:
  explicit ShmLink(LinkHost& host)
      : host_(host),
        may_map_(host.options().raw.shm_mapped != 0),
        may_process_vm_(host.options().raw.shm_process_vm != 0),
        copy_threads_(copy_threads(host.options())) {}

  void offer_on_loop();

  const char* lane() const override { return "shm"; }
  const char* lane_for(const RemoteRegion& remote) const override {
    return maps(remote) ? "shm-mapped" : "shm-process_vm";
  }
  std::string refuses(const Op& op) const override;
  bool try_inline(const OpRef& op) override;
  bool reads_now() const override { return true; }
  const char* read_now(const RemoteRegion& remote, uint8_t* local, uint64_t offset, uint64_t length) override;
  void start_on_loop(const OpRef& op) override;
  void stop_on_loop(const OpRef& op) override;
  void close_on_loop(const Status& why) override;
  void on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds, Reply& reply) override;
  bool touches(uint64_t region_id) const override;
  void map_on_loop(const OpRef& op) override { start_on_loop(op); }

 private:
  friend class ShmTransfer;
  enum class Phase { offering, ready, refused };

  bool maps(const RemoteRegion& remote) const { return remote.shared_id != 0 && may_map_; }
  void settle_on_loop(Phase phase, std::string reason);
  void take_ledger_on_loop(const Fd& fd);
  void take_board_on_loop(Reader& in, const Fd& fd);
  void go_on_loop(const OpRef& op);
  void map_then_go_on_loop(const OpRef& op);
  void ask_on_loop(ShmMappings::Key key);
  void mapped_on_loop(ShmMappings::Key key, Reply reply);
  void not_mapped_on_loop(const OpRef& op, const Status& why);
  Status admit(const RemoteRegion& remote, uint32_t right, const ShmMappings::Mapped& mapped) const;
  void copy_on_loop(const OpRef& op, ShmMappings::Mapped mapped);
  void serve_map_on_loop(Reader& in, Reply& reply);

  LinkHost& host_;
  const bool may_map_, may_process_vm_;
  const uint32_t copy_threads_;
  Closing closing_;
  const std::shared_ptr<CopyPool> pool_ = CopyPool::of_process();

  // The peer's accesses to our memory.
  std::optional<uint32_t> line_;  // of our board: says that this link is not closed
  Fd board_fd_;
  std::unique_ptr<Mapping> their_ledger_;
  std::atomic<const LedgerEntry*> their_entries_{nullptr};

  // Our accesses to the peer's. Set before phase_ becomes ready, constant after.
  std::atomic<Phase> phase_{Phase::offering};
  std::string refusal_, no_process_vm_ = "option shm_process_vm is off";
  Fd ledger_fd_;
  std::unique_ptr<Mapping> ledger_mapping_;
  std::optional<Ledger> ledger_;
  std::optional<PeerBoard> board_;
  ProcessMemory process_;
  OwnerSigns signs_;

  ShmMappings mappings_;
  std::vector<OpRef> early_;  // for the offer
  // For a mapping that was asked for, in the name of the first one's region.
  std::unordered_map<ShmMappings::Key, std::vector<OpRef>, ShmMappings::Hash> asks_;
};

// An operation on the peer's region.
class ShmTransfer final : public Transfer {
 public:
  ShmTransfer(ShmLink& link, const OpRef& op, ShmMappings::Mapped mapped, Kept kept = {})
      : Transfer(link.host_, op, *link.ledger_, link.closing_, std::move(kept)),
        link_(link),
        mapped_(std::move(mapped)) {
    if (!mapped_.mapping) return;
    const auto address = reinterpret_cast<uintptr_t>(mapped_.mapping->address());
    region_ = reinterpret_cast<uint8_t*>(address + remote().shared_offset);  // inside: admit checks
    const bool bulk = (op->flags & MR_BULK) != 0;
    if (op->verb == Verb::read)
      copy_ = BulkCopy(op->local, op->local_view, region_, op->remote_view, bulk, &op->block_sums);
    if (op->verb == Verb::write) copy_ = BulkCopy(region_, op->remote_view, op->local, op->local_view, bulk);
  }

  bool in_order() const { return copy_.in_order(); }

 private:
  const char* lane() const override { return mapped_.mapping ? "shm-mapped" : "shm-process_vm"; }
  const char* counter() const override { return right() == MR_READ ? "shm_read_bytes" : "shm_write_bytes"; }

  Status admit() override {
    Status status = link_.admit(remote(), right(), mapped_);
    return status.ok() ? check_bounds(remote().size) : status;
  }

  bool live() const override { return link_.board_->live(remote()); }

  Status move(uint64_t begin, uint64_t length) override {
    if (!mapped_.mapping) return move_by_process(begin, length);
    // Memory of a process that was killed can be read as long as it is mapped here.
    if (!link_.signs_.are_up()) return fail(MR_PEER_LOST, "its process has ended, or has closed the connection");
    if (right() != MR_READ) changed().store(true, std::memory_order_relaxed);
    if (is_atomic(op_->verb))
      apply_atomic(region_);
    else
      copy_.copy(begin, length);
    return {};
  }

  Status move_by_process(uint64_t begin, uint64_t length) {
    Status status = op_->verb == Verb::read ? link_.process_.read(op_->local, op_->local_view, remote().base,
                                                                  op_->remote_view, begin, length)
                                            : link_.process_.write(op_->local, op_->local_view, remote().base,
                                                                   op_->remote_view, begin, length, changed());
    if (status.ok() && op_->block_sums.wanted())
      op_->block_sums.add(op_->local + op_->local_view.offset() + begin, begin, length);
    if (status.kind != kUnavailable) return status;
    if (changed()) return fail(MR_ACCESS_DENIED, status.text);  // too late for another lane
    status.text = std::string(lane()) + ": " + status.text;
    return status;
  }

  const ShmLink& link_;
  const ShmMappings::Mapped mapped_;
  uint8_t* region_ = nullptr;
  BulkCopy copy_;
};

// ---- Getting to know each other ----

void ShmLink::offer_on_loop() {
  try {
    Fd memory = make_memfd("monarch_rdma ledger", kLedgerBytes);
    ledger_mapping_ = std::make_unique<Mapping>(memory.get(), kLedgerBytes, true);
    ledger_.emplace(reinterpret_cast<LedgerEntry*>(ledger_mapping_->address()));
    ledger_fd_ = read_only(memory.get());
  } catch (const Error& error) {
    return settle_on_loop(Phase::refused, error.status().text);
  }
  host_.send_on_loop(kShmOffer, Writer().put(static_cast<uint8_t>(Offer::ledger)).take(), &ledger_fd_);
}

void ShmLink::take_ledger_on_loop(const Fd& fd) {
  RegionTable& regions = host_.regions();
  const uint64_t word = random_u64() | 1;
  Writer out;
  try {
    if (their_ledger_) throw Error(MR_PROTOCOL, "a second ledger");
    their_ledger_ = map_foreign(fd, kLedgerBytes, false, "ledger");
    board_fd_ = read_only(regions.board_fd());
    line_ = regions.write_line(word);
  } catch (const Error& error) {
    if (error.status().kind == MR_PROTOCOL) throw;
    return host_.send_on_loop(
        kShmOffer,
        out.put(static_cast<uint8_t>(Offer::refused)).text(error.status().text.substr(0, kMaxReason)).take());
  }
  their_entries_.store(reinterpret_cast<const LedgerEntry*>(their_ledger_->address()));
  out.put(static_cast<uint8_t>(Offer::board)).put(static_cast<uint32_t>(this_pid()));
  out.put(*line_).put(word).put(reinterpret_cast<uint64_t>(&regions.line(*line_)->live_id));
  out.put(regions.life_offset()).put(regions.life().value());
  host_.send_on_loop(kShmOffer, out.take(), &board_fd_);
}

void ShmLink::take_board_on_loop(Reader& in, const Fd& fd) {
  ProcessMemory::Identity owner{.pid = host_.info().pid};
  owner.told_pid = static_cast<int>(in.get<uint32_t>());
  const auto line = in.get<uint32_t>();
  owner.word = in.get<uint64_t>();
  owner.word_address = in.get<uint64_t>();
  const auto life_offset = in.get<uint64_t>();
  const auto life_word = in.get<uint32_t>();
  in.end();
  if (phase_ != Phase::offering || !ledger_) throw Error(MR_PROTOCOL, "a board that was not asked for");
  try {
    board_.emplace(map_foreign(fd, kBoardBytes, false, "board"));
  } catch (const Error& error) {
    return settle_on_loop(Phase::refused, error.status().text);
  }
  owner.signs = signs_ = board_->signs(line, owner.word, life_offset, life_word);
  if (may_process_vm_) process_.open(owner, &no_process_vm_);
  settle_on_loop(Phase::ready, "");
}

void ShmLink::settle_on_loop(Phase phase, std::string reason) {
  refusal_ = std::move(reason);
  phase_.store(phase, std::memory_order_release);
  for (const auto& op : std::exchange(early_, {})) go_on_loop(op);
}

void ShmLink::on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds, Reply& reply) {
  if (type == kShmMap) return serve_map_on_loop(in, reply);
  if (type == kShmGone) return mappings_.remove(in.get<uint64_t>());
  if (type != kShmOffer) throw Error(MR_PROTOCOL, "the shm lane knows no frame of type " + std::to_string(type));
  const Fd none;
  const Fd& fd = fds.empty() ? none : fds.front();
  switch (const auto what = in.get<uint8_t>(); static_cast<Offer>(what)) {
    case Offer::ledger:
      return take_ledger_on_loop(fd);
    case Offer::board:
      return take_board_on_loop(in, fd);
    case Offer::refused:
      if (phase_ == Phase::offering) settle_on_loop(Phase::refused, "the peer refuses: " + in.text(kMaxReason));
      return;
    default:
      throw Error(MR_PROTOCOL, "an unknown shm offer " + std::to_string(what));
  }
}

bool ShmLink::touches(uint64_t region_id) const {
  // Gone with the link: a killed reader holds nobody up.
  const LedgerEntry* const entries = their_entries_.load();
  return entries != nullptr && !closing_.is_set() && ledger_names(entries, region_id);
}

void ShmLink::close_on_loop(const Status& why) {
  if (closing_.is_set()) return;
  closing_.set_on_loop(why);
  // A peer that has not noticed yet finds out before it copies.
  if (line_) host_.regions().wipe_line(*std::exchange(line_, std::nullopt));
  auto ops = std::exchange(early_, {});
  for (auto& [key, asking] : std::exchange(asks_, {})) ops.insert(ops.end(), asking.begin(), asking.end());
  for (const auto& op : ops) host_.on_done(op, why);
}

// ---- Operations ----

std::string ShmLink::refuses(const Op& op) const {
  switch (phase_.load(std::memory_order_acquire)) {
    case Phase::offering:
      return "";
    case Phase::refused:
      return refusal_;
    case Phase::ready:
      break;
  }
  if (maps(*op.remote) || (op.verb != Verb::map && process_.is_open())) return "";
  const std::string not_mapped =
      op.remote->shared_id == 0 ? "it is not memory from empty, zeros or share" : "option shm_mapped is off";
  return op.verb == Verb::map ? not_mapped : not_mapped + ", and " + no_process_vm_;
}

bool ShmLink::try_inline(const OpRef& op) {
  if (phase_.load(std::memory_order_acquire) != Phase::ready || closing_.is_set()) return false;
  const RemoteRegion& remote = *op->remote;
  if (maps(remote)) {
    if (!is_atomic(op->verb) && !is_small(*op, kInline)) return false;
    auto mapped = mappings_.find(ShmMappings::key_of(remote));
    // Without a mapping, or where the word is not aligned in the owner's memory, the owner's own thread is asked.
    if (!mapped.mapping || (is_atomic(op->verb) && (remote.base + op->remote_view.offset()) % sizeof(uint64_t) != 0))
      return false;
    return ShmTransfer(*this, op, std::move(mapped)).run_inline();
  }
  if (is_atomic(op->verb) || !process_.is_open() || !is_small(*op, kInline)) return false;
  return ShmTransfer(*this, op, {}).run_inline();
}

// What ShmTransfer does, for what nobody can stop and that leaves nothing to tell.
const char* ShmLink::read_now(const RemoteRegion& remote, uint8_t* local, uint64_t offset, uint64_t length) {
  if (phase_.load(std::memory_order_acquire) != Phase::ready || closing_.is_set() || length > kInline) return nullptr;
  const bool mapped_here = maps(remote);
  const auto mapped = mapped_here ? mappings_.find(ShmMappings::key_of(remote)) : ShmMappings::Mapped{};
  if (mapped_here ? !mapped.mapping : !process_.is_open()) return nullptr;
  const LedgerClaim claim = ledger_->claim(remote.name.id);
  if (!claim || !admit(remote, MR_READ, mapped).ok()) return nullptr;
  if (offset > remote.size || length > remote.size - offset || !signs_.are_up()) return nullptr;
  if (mapped_here)
    std::memmove(local, mapped.mapping->address() + remote.shared_offset + offset, length);
  else if (!process_.read(local, View::contiguous(0, length), remote.base, View::contiguous(offset, length), 0, length)
                .ok())
    return nullptr;
  if (!board_->live(remote)) return nullptr;
  host_.count("shm_read_bytes", length);
  return lane_for(remote);
}

void ShmLink::start_on_loop(const OpRef& op) {
  if (closing_.is_set()) return host_.on_done(op, closing_.why());
  if (phase_ == Phase::offering)
    early_.push_back(op);
  else
    go_on_loop(op);
}

void ShmLink::go_on_loop(const OpRef& op) {
  if (std::string reason = refuses(*op); !reason.empty())
    host_.on_done(op, Status{kUnavailable, 0, "shm: " + std::move(reason)});
  else if (maps(*op->remote))
    map_then_go_on_loop(op);
  else
    copy_on_loop(op, {});
}

// Does the owner's board grant the right, and is the handle's range what the region is?
Status ShmLink::admit(const RemoteRegion& remote, uint32_t right, const ShmMappings::Mapped& mapped) const {
  if (Status status = board_->admit(remote, right); !status.ok() || !mapped.mapping) return status;
  const uint64_t offset = remote.base - mapped.owner_address, whole = mapped.mapping->size();
  if (offset != remote.shared_offset || offset > whole || remote.size > whole - offset)
    return fail(MR_ACCESS_DENIED, "the handle's range is not the region's");
  return {};
}

void ShmLink::copy_on_loop(const OpRef& op, ShmMappings::Mapped mapped) {
  if (op->verb == Verb::map) {
    if (Status status = admit(*op->remote, op->remote->access, mapped); !status.ok()) return host_.on_done(op, status);
    op->mapping = std::move(mapped.mapping);
    op->lane = "shm-mapped";
    return host_.on_done(op, {});
  }
  auto job = std::make_shared<ShmTransfer>(*this, op, std::move(mapped), Kept{op, shared_from_this()});
  const uint32_t threads = job->in_order() ? 1 : copy_threads_;
  try {
    op->set_helper(pool_->submit(std::move(job), op->bytes(), threads, max_chunk(*op)));
  } catch (const Error& error) {
    host_.on_done(op, error.status());
  }
}

void ShmLink::stop_on_loop(const OpRef& op) {
  // Threads look at op->stop_kind before each chunk; what waits for the peer ends here.
  const auto take = [&op](std::vector<OpRef>& from) { return std::erase(from, op) != 0; };
  bool waits = take(early_);
  for (auto& [key, asking] : asks_) waits |= take(asking);
  if (waits) host_.on_done(op, fail(op->stop_kind, "it was stopped while it waited for the peer"));
}

// ---- Mappings ----

void ShmLink::map_then_go_on_loop(const OpRef& op) {
  const auto key = ShmMappings::key_of(*op->remote);
  if (auto mapped = mappings_.find(key); mapped.mapping) return copy_on_loop(op, std::move(mapped));
  auto& ops = asks_[key];
  ops.push_back(op);
  if (ops.size() == 1) ask_on_loop(key);
}

void ShmLink::ask_on_loop(ShmMappings::Key key) {
  Writer out;
  asks_[key].front()->remote->name.encode(out);
  out.put(key.shared_id).put(static_cast<uint8_t>(key.writable));
  host_.request_on_loop(kShmMap, out.take(),
                        [self = shared_from_this(), key](Reply reply) { self->mapped_on_loop(key, std::move(reply)); });
}

void ShmLink::mapped_on_loop(ShmMappings::Key key, Reply reply) {
  auto node = asks_.extract(key);
  if (node.empty()) return;  // closed, or all were stopped and others have asked again
  auto ops = std::move(node.mapped());
  Status status = std::move(reply.status);
  try {
    if (status.ok()) {
      Reader in(reply.payload);
      const auto owner_address = in.get<uint64_t>();
      auto mapping = unmapped_elsewhere(map_foreign(reply.fd, 1, key.writable, "shared memory"));
      mappings_.add(key, {std::move(mapping), owner_address});
    }
  } catch (const Error& error) {
    status = error.status();
  }
  if (status.ok()) {
    for (const auto& op : ops) map_then_go_on_loop(op);
  } else if (!ops.empty()) {
    // The reason may be the region that was named: the others ask with theirs.
    const OpRef first = std::move(ops.front());
    ops.erase(ops.begin());
    if (!ops.empty()) {
      asks_[key] = std::move(ops);
      ask_on_loop(key);
    }
    not_mapped_on_loop(first, status);
  }
}

void ShmLink::not_mapped_on_loop(const OpRef& op, const Status& why) {
  if (why.kind == MR_ACCESS_DENIED || why.kind == MR_PEER_LOST || op->verb == Verb::map) return host_.on_done(op, why);
  const std::string reason = "shm-mapped: " + why.text;
  if (!process_.is_open() || (op->flags & MR_STRICT) != 0)
    return host_.on_done(op, Status{kUnavailable, why.sys_errno, reason});
  op->skipped += (op->skipped.empty() ? "" : "; ") + reason;
  copy_on_loop(op, {});
}

// The owner's side. A region that does not grant write is shared through a descriptor that can't either.
void ShmLink::serve_map_on_loop(Reader& in, Reply& reply) {
  const RegionName name = RegionName::decode(in);
  const auto shared_id = in.get<uint64_t>();
  const bool writable = in.get<uint8_t>() != 0;
  in.end();
  const RegionRef region = host_.regions().find(name, writable ? MR_WRITE : MR_READ);
  if (!region->shared || region->shared->id != shared_id)
    throw Error(MR_ACCESS_DENIED,
                "region " + std::to_string(name.id) + " is not in shared memory " + std::to_string(shared_id));
  const Fd& fd = writable ? region->shared->fd : region->shared->fd_read_only;
  reply.fd = Fd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!reply.fd.valid())
    throw Error(MR_REGISTRATION, "the owner can't pass a descriptor of its shared memory (raise `ulimit -n`)", errno);
  reply.payload = Writer().put(reinterpret_cast<uint64_t>(region->shared->mapping.address())).take();
}

}  // namespace

std::shared_ptr<Link> make_shm(LinkHost& host) {
  if (!host.info().over_unix) return nullptr;  // another host, or no way to pass descriptors
  auto link = std::make_shared<ShmLink>(host);
  link->offer_on_loop();
  return link;
}

}  // namespace mr
