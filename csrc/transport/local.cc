// Operations of this process on its own regions: the shm lane without a peer. Region checks come from the table itself;
// a ledger of our own makes a drop wait for copies in flight.
#include <array>

#include "bulk_copy.h"
#include "transfer.h"

namespace mr {
namespace {

constexpr uint64_t kInlineBytes = 1u << 20;  // about 20 to 100 us: what handing it to another thread costs

class LocalTransfer final : public Transfer {
 public:
  LocalTransfer(LinkHost& host, const OpRef& op, Ledger& ledger, const Closing& closing, Kept kept = {})
      : Transfer(host, op, ledger, closing, std::move(kept)) {
    auto* const region = reinterpret_cast<uint8_t*>(remote().base);
    const bool bulk = (op->flags & MR_BULK) != 0;
    if (op->verb == Verb::read)
      copy_ = BulkCopy(op->local, op->local_view, region, op->remote_view, bulk, &op->block_sums);
    if (op->verb == Verb::write) copy_ = BulkCopy(region, op->remote_view, op->local, op->local_view, bulk);
  }

  bool in_order() const { return copy_.in_order(); }

 private:
  const char* lane() const override { return "local"; }
  const char* counter() const override { return right() == MR_READ ? "local_read_bytes" : "local_write_bytes"; }

  Status admit() override {
    try {
      region_ = host_.regions().find(remote().name, right());
    } catch (const Error& error) {
      return error.status();
    }
    if (reinterpret_cast<uintptr_t>(region_->base) != remote().base || region_->device >= 0)
      return fail(MR_ACCESS_DENIED, "the handle's address is not the region's");
    if ((remote().base + op_->remote_view.offset()) % sizeof(uint64_t) != 0 && is_atomic(op_->verb))
      return fail(MR_OUT_OF_BOUNDS,
                  "offset " + std::to_string(op_->remote_view.offset()) + " is not aligned to 8 bytes");
    return check_bounds(region_->size);
  }

  bool live() const override { return !region_->dropped.load(); }

  Status move(uint64_t begin, uint64_t length) override {
    if (right() != MR_READ) changed().store(true, std::memory_order_relaxed);
    if (is_atomic(op_->verb))
      apply_atomic(region_->base);
    else
      copy_.copy(begin, length);
    return {};
  }

  BulkCopy copy_;
  RegionRef region_;
};

class LocalLink final : public Link, public std::enable_shared_from_this<LocalLink> {
 public:
  explicit LocalLink(LinkHost& host) : host_(host), copy_threads_(copy_threads(host.options())) {}

  const char* lane() const override { return "local"; }
  const char* lane_for(const RemoteRegion&) const override { return "local"; }
  std::string refuses(const Op& op) const override {
    return op.verb == Verb::map && op.remote->shared_id == 0 ? "it is not memory from empty, zeros or share" : "";
  }

  bool try_inline(const OpRef& op) override {
    if (closing_.is_set() || (!is_atomic(op->verb) && !is_small(*op, kInlineBytes))) return false;
    return LocalTransfer(host_, op, ledger_, closing_).run_inline();
  }

  void start_on_loop(const OpRef& op) override {
    if (closing_.is_set()) return host_.on_done(op, closing_.why());
    auto job = std::make_shared<LocalTransfer>(host_, op, ledger_, closing_, Kept{op, shared_from_this()});
    const uint32_t threads = job->in_order() ? 1 : copy_threads_;
    try {
      op->set_helper(pool_->submit(std::move(job), op->bytes(), threads, max_chunk(*op)));
    } catch (const Error& error) {
      host_.on_done(op, error.status());
    }
  }

  void stop_on_loop(const OpRef&) override {}  // threads look at op->stop_kind before each chunk
  void close_on_loop(const Status& why) override { closing_.set_on_loop(why); }
  void on_frame_on_loop(uint16_t type, Reader&, std::vector<Fd>&, Reply&) override {
    throw Error(MR_PROTOCOL, "the local lane has no frames, got type " + std::to_string(type));
  }
  bool touches(uint64_t region_id) const override { return ledger_.names(region_id); }

  void map_on_loop(const OpRef& op) override {
    Status status;
    try {
      const RemoteRegion& remote = *op->remote;
      const RegionRef region = host_.regions().find(remote.name, remote.access);
      if (region->size != remote.size || region->shared_offset != remote.shared_offset)
        status = fail(MR_ACCESS_DENIED, "the handle's range is not the region's");
      else if (region->shared)
        op->mapping = std::shared_ptr<Mapping>(region->shared, &region->shared->mapping);
      else
        status = Status{kUnavailable, 0, "local: it is not memory from empty, zeros or share"};
    } catch (const Error& error) {
      status = error.status();
    }
    op->lane = lane();
    host_.on_done(op, std::move(status));
  }

 private:
  LinkHost& host_;
  const uint32_t copy_threads_;
  std::array<LedgerEntry, kLedgerEntries> entries_{};
  Ledger ledger_{entries_.data()};
  Closing closing_;
  const std::shared_ptr<CopyPool> pool_ = CopyPool::of_process();
};

}  // namespace

std::shared_ptr<Link> make_local(LinkHost& host) { return std::make_shared<LocalLink>(host); }

}  // namespace mr
