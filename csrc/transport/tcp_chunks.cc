#include "tcp_chunks.h"

#include <algorithm>
#include <cstring>

namespace mr::tcp {
namespace {

const View kText = View::contiguous(0, kMaxText);
const uint8_t kZeros[4096] = {};

}  // namespace

bool Gather::refer(const uint8_t* data, size_t length) {
  parts_[count_++] = {const_cast<uint8_t*>(data), length};
  bytes_ += length;
  return true;
}

bool Gather::copy(const void* data, size_t length) {
  if (full() || length > kStagingBytes - staged_) return false;
  uint8_t* to = staging_ + staged_;
  std::memcpy(to, data, length);
  staged_ += length;
  iovec* const last = count_ > 0 ? &parts_[count_ - 1] : nullptr;
  if (last == nullptr || static_cast<uint8_t*>(last->iov_base) + last->iov_len != to) return refer(to, length);
  last->iov_len += length;
  bytes_ += length;
  return true;
}

bool Gather::memory(const uint8_t* base, Cursor cursor, uint64_t length) {
  while (length > 0) {
    if (full()) return false;
    const auto run = cursor.peek(std::min(length, limit_ - bytes_));
    if (run.length < kPackBelow) {
      if (!copy(base + run.offset, run.length)) return false;
    } else {
      refer(base + run.offset, run.length);
    }
    cursor.advance(run.length);
    length -= run.length;
  }
  return true;
}

bool Gather::zeros(uint64_t length) {
  while (length > 0) {
    if (full()) return false;
    const uint64_t piece = std::min<uint64_t>(length, sizeof kZeros);
    refer(kZeros, piece);
    length -= piece;
  }
  return true;
}

ChunkSender::ChunkSender(uint32_t id, const uint8_t* base, const View& view, uint64_t begin, uint64_t length)
    : bytes_left_(length), base_(base), cursor_(view, begin) {
  head_.id = id;
  begin_chunk();
}

ChunkSender::ChunkSender(uint32_t id, Status end, bool touched) : cursor_(kText), end_(std::move(end)) {
  head_.id = id;
  head_.touched = touched;
  begin_chunk();
}

void ChunkSender::begin_chunk() {
  head_left_ = sizeof head_;
  if (end_.ok() && bytes_left_ > 0) {
    payload_left_ = std::min(bytes_left_, kChunkBytes);
    bytes_left_ -= payload_left_;
  } else {
    payload_left_ = std::min(end_.text.size(), kMaxText);
    base_ = reinterpret_cast<const uint8_t*>(end_.text.data());
    cursor_ = Cursor(kText);
    head_.kind = static_cast<uint8_t>(end_.kind);
    head_.last = 1;
  }
  head_.length = static_cast<uint32_t>(payload_left_);
}

void ChunkSender::end_early(Status end) {
  if (head_.last || !end_.ok()) return;
  end_ = std::move(end);
  if (!inside_chunk()) begin_chunk();
}

bool ChunkSender::gather(Gather& out) const {
  const auto* const head = reinterpret_cast<const uint8_t*>(&head_);
  if (head_left_ > 0 && !out.copy(head + sizeof head_ - head_left_, head_left_)) return false;
  if (!(base_ != nullptr ? out.memory(base_, cursor_, payload_left_) : out.zeros(payload_left_))) return false;
  if (head_.last) return true;
  if (bytes_left_ > 0 || !end_.ok()) return false;
  Chunk end;
  end.id = head_.id;
  end.last = 1;
  return out.copy(&end, sizeof end);
}

size_t ChunkSender::sent(size_t length) {
  while (!done_) {
    const size_t head = std::min(length, head_left_);
    head_left_ -= head;
    length -= head;
    const uint64_t payload = std::min<uint64_t>(length, payload_left_);
    if (payload > 0) cursor_.seek(cursor_.position() + payload);
    payload_left_ -= payload;
    length -= payload;
    if (head_left_ > 0 || payload_left_ > 0) break;
    if (head_.last)
      done_ = true;
    else
      begin_chunk();
  }
  return length;
}

}  // namespace mr::tcp
