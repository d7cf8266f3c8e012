// One read or write on its way over the verbs lane, and how it is cut into work requests.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "op.h"
#include "verbs_memory.h"
#include "verbs_wire.h"

namespace mr {

constexpr uint32_t kMaxPieces = 16;  // of the scatter-gather list of one request

// One work request: contiguous over there, in pieces here.
struct VerbsRequest {
  uint64_t begin = 0, length = 0;  // which bytes of the operation
  uint64_t remote = 0;
  uint32_t rkey = 0;
  uint32_t num_pieces = 0;
  ibv_sge pieces[kMaxPieces];
};

class VerbsTransfer : public std::enable_shared_from_this<VerbsTransfer> {
 public:
  // num_rails: places for the registrations of local memory.
  VerbsTransfer(OpRef op, size_t num_rails);

  bool is_write() const { return op->verb == Verb::write; }
  bool has_work() const { return failure.ok() && !ended && !todo_.empty(); }
  // The next bytes to move, at most `most` of them, none twice: what `keys` and `local` allow in one request.
  VerbsRequest take(const VerbsKeys& keys, const Registration& local, uint64_t most, uint32_t max_pieces);
  // Bytes that were taken and did not arrive, or may not have.
  void give_back(uint64_t begin, uint64_t length);
  void drop_work() { todo_.clear(); }

  const OpRef op;
  uint32_t open = 0;           // requests on queue pairs that live
  uint64_t rails = 0;          // bit set: they moved bytes
  bool begun = false;          // a request of it was posted
  bool queued = false;         // waits in the client's queue
  bool may_register = false;   // its memory, by itself
  bool is_dealt_out = false;   // no rail leaves a share to those that are not ready yet any more
  bool ended = false;          // on_done was called: its memory is out of bounds
  uint32_t access_errors = 0;  // the peer's card refused so many requests
  uint32_t setbacks = 0;       // queue pairs that failed under it
  Status failure;              // the first one; nothing is posted after it

  // What it needs at a rail, before anything can be posted there.
  enum class Local : uint8_t { unknown, asked, here, failed };
  struct AtRail {
    Local state = Local::unknown;
    RegistrationRef registration;
    Status why;
    uint64_t taken = 0;  // bytes that were posted there
  };
  std::vector<AtRail> local;

 private:
  struct Range {
    uint64_t begin, end;
  };
  std::deque<Range> todo_;
  Cursor remote_, here_;
};
using VerbsTransferRef = std::shared_ptr<VerbsTransfer>;

}  // namespace mr
