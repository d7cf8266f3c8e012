#include "transfer.h"

#include <algorithm>
#include <thread>

namespace mr {
namespace {

// A run costs a few nanoseconds, or 400 where the kernel copies.
constexpr uint64_t kInlineRuns = 512, kChunkRuns = 4096;
constexpr uint64_t kSummedChunk = 512u << 10;  // still in a cache when its checksum is made

uint64_t num_runs(const View& view) { return view.run() == 0 ? 0 : view.bytes() / view.run(); }

}  // namespace

uint64_t max_chunk(const Op& op) {
  if (op.block_sums.wanted()) return kSummedChunk;
  const uint64_t run = std::max<uint64_t>(1, std::min(op.remote_view.run(), op.local_view.run()));
  return run <= UINT64_MAX / kChunkRuns ? run * kChunkRuns : UINT64_MAX;
}

bool is_small(const Op& op, uint64_t limit) {
  return (op.verb == Verb::read || op.verb == Verb::write) && op.bytes() <= limit &&
         std::max(num_runs(op.remote_view), num_runs(op.local_view)) <= kInlineRuns;
}

uint32_t Transfer::right() const {
  if (op_->verb == Verb::read || op_->verb == Verb::map) return MR_READ;
  return op_->verb == Verb::write ? MR_WRITE : MR_READ | MR_WRITE;
}

Status Transfer::check_bounds(uint64_t region_size) const {
  if (op_->remote_view.fits(region_size)) return {};
  return fail(MR_OUT_OF_BOUNDS, "it leaves the region, which has " + std::to_string(region_size) + " bytes");
}

void Transfer::apply_atomic(uint8_t* region) {
  std::atomic_ref<uint64_t> cell(*reinterpret_cast<uint64_t*>(region + op_->remote_view.offset()));
  if (op_->verb == Verb::fetch_add) {
    op_->value = cell.fetch_add(op_->operand[0]);
  } else {
    op_->value = op_->operand[0];
    cell.compare_exchange_strong(op_->value, op_->operand[1]);
  }
}

Status Transfer::early_end() const {
  if (const int kind = op_->stop_kind.load(std::memory_order_relaxed); kind != 0)
    return fail(kind, kind == MR_TRANSFER_TIMEOUT ? "its deadline passed" : "it was cancelled");
  if (closing_.is_set()) return closing_.why();
  return {};
}

bool Transfer::run_inline() {
  claim_ = ledger_.claim(remote().name.id);
  if (!claim_) return false;
  Status status = admit();
  if (status.ok()) status = copy(0, op_->bytes());
  end(std::move(status), 1, 1);
  return true;
}

Status Transfer::begin() {
  if (op_->block_sums.wanted()) op_->block_sums.clear(op_->bytes());  // another lane may have made some
  while (true) {
    if (Status status = early_end(); !status.ok()) return status;
    if ((claim_ = ledger_.claim(remote().name.id))) return admit();
    std::this_thread::yield();  // the others hold theirs for a few milliseconds at most
  }
}

Status Transfer::copy(uint64_t begin, uint64_t length) {
  if (Status status = early_end(); !status.ok()) return status;
  if (!live()) return fail(MR_ACCESS_DENIED, "the region was dropped");
  return length == 0 ? Status{} : move(begin, length);
}

void Transfer::end(Status status, uint32_t chunks, uint32_t threads) {
  // The entry in the ledger kept the memory as it was up to here, unless the owner gave up waiting for this.
  if (status.ok() && !live())
    status = fail(MR_ACCESS_DENIED, "the region was dropped while bytes moved; the result is discarded");
  claim_.wipe();
  op_->lane = lane();
  op_->chunks.store(chunks, std::memory_order_relaxed);
  op_->rails.store(threads, std::memory_order_relaxed);
  if (right() != MR_READ)
    op_->remote_state = status.ok()                                ? MR_WRITTEN
                        : changed_.load(std::memory_order_relaxed) ? MR_UNKNOWN
                                                                   : MR_NOT_WRITTEN;
  if (status.ok()) host_.count(counter(), op_->bytes());
  host_.on_done(op_, std::move(status));
}

}  // namespace mr
