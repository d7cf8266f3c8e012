// One operation that this process carries out by itself, without the owner's help (shm and local lanes): a read or
// write as a job of the copy pool or in the caller's thread, or an atomic. What both lanes share is here: the entry in
// the ledger, the checks before each chunk and after the last, early ends, and the one report.
#pragma once

#include "copy_pool.h"
#include "lane.h"
#include "ledger.h"

namespace mr {

// The end of a link, set once on the loop and seen by every thread.
class Closing {
 public:
  void set_on_loop(const Status& why) {
    if (is_set()) return;
    why_ = why;
    set_.store(true, std::memory_order_release);
  }
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  const Status& why() const { return why_; }  // once set

 private:
  std::atomic<bool> set_{false};
  Status why_;
};

// What a job of the pool keeps alive; the caller's thread needs none of it.
struct Kept {
  OpRef op;
  std::shared_ptr<const Link> link;
};

class Transfer : public CopyJob {
 public:
  Transfer(LinkHost& host, const OpRef& op, Ledger& ledger, const Closing& closing, Kept kept)
      : host_(host), kept_(std::move(kept)), op_(kept_.op ? kept_.op : op), ledger_(ledger), closing_(closing) {}

  // All of it, by this thread, reported before it returns. False where the ledger is full; then nothing has happened.
  bool run_inline();

  Status begin() override;
  Status copy(uint64_t begin, uint64_t length) override;
  void end(Status status, uint32_t chunks, uint32_t threads) override;

 protected:
  const RemoteRegion& remote() const { return *op_->remote; }
  // The rights that the operation needs of the region.
  uint32_t right() const;
  Status check_bounds(uint64_t region_size) const;
  void apply_atomic(uint8_t* region);  // at op's offset in the region
  // Set before or as soon as bytes of the region are changed: from then on a failure leaves them unknown.
  std::atomic<bool>& changed() { return changed_; }

  virtual const char* lane() const = 0;
  virtual const char* counter() const = 0;  // of bytes moved
  // With the entry in the ledger: may this operation touch the region?
  virtual Status admit() = 0;
  virtual bool live() const = 0;
  virtual Status move(uint64_t begin, uint64_t length) = 0;

  LinkHost& host_;
  const Kept kept_;
  const OpRef& op_;

 private:
  Status early_end() const;  // ok: go on

  Ledger& ledger_;
  const Closing& closing_;
  LedgerClaim claim_;
  std::atomic<bool> changed_{false};
};

// Most bytes for one chunk of a strided read or write, as what is copied run by run takes longer; or of one with sums.
uint64_t max_chunk(const Op& op);
// A read or write small enough for the caller's thread: `limit` bytes, and not too many runs.
bool is_small(const Op& op, uint64_t limit);

}  // namespace mr
