#include "bulk_copy.h"

#include <cstring>

#include "../memory/strided_copy.h"

namespace mr {

BulkCopy::BulkCopy(uint8_t* dst, const View& dst_view, const uint8_t* src, const View& src_view, bool one_of_many,
                   const BlockSums* sums)
    : dst_(dst), src_(src), dst_view_(&dst_view), src_view_(&src_view) {
  if (sums != nullptr && sums->wanted()) sums_ = sums;
  const uint64_t bytes = dst_view.bytes();
  streaming_ = bytes >= (one_of_many ? kStreamingPart : kStreamingBytes);
  contiguous_ = dst_view.is_contiguous() && src_view.is_contiguous();
  if (!contiguous_) return;
  const auto to = reinterpret_cast<uintptr_t>(dst) + dst_view.offset();
  const auto from = reinterpret_cast<uintptr_t>(src) + src_view.offset();
  if (to > from && to - from < bytes) overlap_ = Overlap::backward;
  if (from >= to && from - to < bytes) overlap_ = Overlap::forward;
}

void BulkCopy::copy(uint64_t begin, uint64_t length) const {
  if (contiguous_) {
    if (overlap_ == Overlap::backward) begin = dst_view_->bytes() - begin - length;
    uint8_t* const to = dst_ + dst_view_->offset() + begin;
    const uint8_t* const from = src_ + src_view_->offset() + begin;
    if (sums_ != nullptr && overlap_ == Overlap::none) return sums_->copy(to, from, begin, length, streaming_);
    if (streaming_ && overlap_ == Overlap::none)
      streaming_copy(to, from, length), finish_streaming();
    else
      std::memmove(to, from, length);
    return;
  }
  if (dst_view_->is_contiguous()) {
    gather(dst_ + dst_view_->offset() + begin, src_, *src_view_, begin, length, streaming_);
  } else if (src_view_->is_contiguous()) {
    scatter(dst_, *dst_view_, src_ + src_view_->offset() + begin, begin, length, streaming_);
  } else {
    copy_strided(begin, length);
  }
}

void BulkCopy::copy_strided(uint64_t begin, uint64_t length) const {
  Cursor to(*dst_view_, begin), from(*src_view_, begin);
  while (length > 0) {
    const auto target = to.peek(length);
    const auto source = from.peek(target.length);
    if (streaming_ && source.length >= kStreamingRun)
      streaming_copy(dst_ + target.offset, src_ + source.offset, source.length);
    else
      std::memcpy(dst_ + target.offset, src_ + source.offset, source.length);
    to.advance(source.length);
    from.advance(source.length);
    length -= source.length;
  }
  if (streaming_) finish_streaming();
}

}  // namespace mr
