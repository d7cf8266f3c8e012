#include "verbs_transfer.h"

#include <algorithm>

namespace mr {
namespace {

constexpr uint64_t kAlign = 64;  // of the boundaries between requests, in the owner's memory

}  // namespace

VerbsTransfer::VerbsTransfer(OpRef op, size_t num_rails)
    : op(std::move(op)), local(num_rails), remote_(this->op->remote_view), here_(this->op->local_view) {
  if (this->op->bytes() > 0) todo_.push_back({0, this->op->bytes()});
}

VerbsRequest VerbsTransfer::take(const VerbsKeys& keys, const Registration& local, uint64_t most, uint32_t max_pieces) {
  Range& range = todo_.front();
  if (remote_.position() != range.begin) {
    remote_.seek(range.begin);
    here_.seek(range.begin);
  }
  const Cursor::Run run = remote_.peek(range.end - range.begin);
  VerbsRequest out;
  out.begin = range.begin;
  out.remote = keys.base + run.offset;
  out.rkey = keys.rkeys[run.offset / keys.piece_bytes];
  uint64_t limit = std::min(run.length, keys.piece_bytes - run.offset % keys.piece_bytes);
  if (limit > most) {
    limit = most;
    if (limit > 2 * kAlign) limit -= (out.remote + limit) % kAlign;
  }
  while (out.length < limit && out.num_pieces < std::min(max_pieces, kMaxPieces)) {
    const Cursor::Run piece = here_.peek(limit - out.length);
    const uint64_t address = reinterpret_cast<uintptr_t>(op->local) + piece.offset;
    const uint64_t length = std::min(piece.length, local.until_seam(address));
    out.pieces[out.num_pieces++] = {address, static_cast<uint32_t>(length), local.lkey(address)};
    out.length += length;
    here_.advance(length);
  }
  remote_.advance(out.length);
  range.begin += out.length;
  if (range.begin == range.end) todo_.pop_front();
  return out;
}

void VerbsTransfer::give_back(uint64_t begin, uint64_t length) {
  if (ended || !failure.ok()) return;
  todo_.push_front({begin, begin + length});
  ++op->retries;
}

}  // namespace mr
