#include <algorithm>
#include <cstring>

#include "tcp_client.h"

namespace mr::tcp {
namespace {

constexpr uint64_t kMaxBytesPosted = 3 * kPartBytes;  // enough that the pipe never drains
constexpr size_t kMaxPosted = 1024;
constexpr size_t kBusy = 16;  // requests

const View kText = View::contiguous(0, kMaxText);

}  // namespace

ClientSocket::ClientSocket(Client& client, LinkHost& host, std::shared_ptr<Staging> staging, Stream stream,
                           uint64_t session, uint64_t number, uint32_t slot)
    : Socket(host, std::move(staging), std::move(stream)),
      session(session),
      number(number),
      slot(slot),
      client_(client) {}

// ---- Requests ----

bool ClientSocket::has_room() const { return bytes_posted_ < kMaxBytesPosted && posted_.size() < kMaxPosted; }

bool ClientSocket::worth_a_call() const { return num_awaited_ < kBusy || posted_.size() - num_sent_ >= kBusy; }

void ClientSocket::post(const TransferRef& transfer, const Part& part) {
  const Op& op = *transfer->op;
  Posted& posted = posted_.emplace_back(Posted{next_id_++, transfer, part, 0, request_bytes(op.remote_view), {}});
  if (transfer->is_write()) posted.data.emplace(posted.id, op.local, op.local_view, part.begin, part.length);
  bytes_posted_ += part.length;
}

void ClientSocket::post_cancel(uint32_t id) {
  posted_.emplace_back(Posted{next_id_++, nullptr, {}, id, sizeof(Request), {}});
}

size_t ClientSocket::encode(const Posted& posted, uint8_t* out) const {
  if (!posted.transfer) return encode_request(RequestKind::cancel, posted.cancels, {}, {}, 0, 0, out);
  const Op& op = *posted.transfer->op;
  return encode_request(posted.data ? RequestKind::write : RequestKind::read, posted.id, op.remote->name,
                        op.remote_view, posted.part.begin, posted.part.length, out);
}

void ClientSocket::gather(Gather& out) {
  uint8_t head[kMaxRequestBytes];
  for (size_t i = num_sent_; i < posted_.size(); ++i) {
    const Posted& posted = posted_[i];
    if (posted.head_left > 0 && !out.copy(head + encode(posted, head) - posted.head_left, posted.head_left)) return;
    if (posted.data && !posted.data->gather(out)) return;
  }
}

void ClientSocket::sent(size_t length) {
  for (; num_sent_ < posted_.size(); ++num_sent_) {
    Posted& posted = posted_[num_sent_];
    const size_t head = std::min(length, posted.head_left);
    posted.begun |= head > 0;
    posted.head_left -= head;
    length -= head;
    if (posted.head_left > 0) return;
    if (posted.data) {
      const size_t before = length;
      length = posted.data->sent(length);
      if (length < before && posted.part.length > 0 && !std::exchange(posted.maybe_written, true))
        ++posted.transfer->maybe_written;
      if (!posted.data->done()) return;
    }
    num_awaited_ += posted.transfer != nullptr;
  }
}

bool ClientSocket::withdraw(const TransferRef& transfer) {
  if (!is_open()) return true;
  if (!posted_.empty() && posted_.front().transfer == transfer) discard_payload();
  std::vector<uint32_t> reads;
  for (size_t i = 0; i < posted_.size();) {
    Posted& posted = posted_[i];
    if (posted.transfer != transfer) {
      ++i;
    } else if (!posted.begun) {
      bytes_posted_ -= posted.part.length;
      --transfer->open;
      posted_.erase(posted_.begin() + static_cast<ptrdiff_t>(i));
    } else {
      if (posted.data && posted.data->needs_memory()) return false;
      if (posted.data)
        posted.data->end_early(fail(MR_CANCELLED, ""));
      else
        reads.push_back(posted.id);
      ++i;
    }
  }
  for (const uint32_t id : reads) post_cancel(id);
  return true;
}

std::deque<ClientSocket::Posted> ClientSocket::take_posted() {
  num_sent_ = num_awaited_ = 0;
  bytes_posted_ = 0;
  return std::exchange(posted_, {});
}

// ---- Answers ----

void ClientSocket::drop_sent_cancels() {
  while (num_sent_ > 0 && !posted_.front().transfer) {
    posted_.pop_front();
    --num_sent_;
  }
}

void ClientSocket::on_head(const uint8_t* head) {
  std::memcpy(&chunk_, head, sizeof chunk_);
  drop_sent_cancels();
  if (num_sent_ == 0 || chunk_.id != posted_.front().id) throw Error(MR_PROTOCOL, "an answer to no request");
  if (chunk_.kind > MR_CONFIG || chunk_.last > 1 || chunk_.touched > 1 || chunk_.zero != 0)
    throw Error(MR_PROTOCOL, "an answer that is not of this protocol");
  if (chunk_.last == 0) return expect_data(posted_.front());
  if (chunk_.length > (chunk_.kind == MR_OK ? 0 : kMaxText)) throw Error(MR_PROTOCOL, "an answer with too long a text");
  expect(text_, kText, 0, chunk_.length);
}

void ClientSocket::expect_data(const Posted& posted) {
  const uint64_t left = posted.data ? 0 : posted.part.length - posted.received;
  if (chunk_.kind != MR_OK || chunk_.length == 0 || chunk_.length > kChunkBytes || chunk_.length > left)
    throw Error(MR_PROTOCOL, std::to_string(chunk_.length) + " bytes where " + std::to_string(left) + " are awaited");
  const Op& op = *posted.transfer->op;
  expect(posted.transfer->ended ? nullptr : op.local, op.local_view, posted.part.begin + posted.received,
         chunk_.length);
}

// Checksums, while the bytes are in a cache. What is asked for once more is counted twice: then the sums are none.
void ClientSocket::on_payload() {
  if (chunk_.last != 0) return;
  Posted& posted = posted_.front();
  const Op& op = *posted.transfer->op;
  if (posted.transfer->ended || !op.block_sums.wanted()) return;
  const uint64_t come = posted.received + chunk_.length - payload_left();
  const uint64_t end = come == posted.part.length ? come : come - come % sizeof(uint64_t);
  const uint64_t begin = posted.part.begin + posted.summed;
  op.block_sums.add(op.local + op.local_view.offset() + begin, begin, end - posted.summed);
  posted.summed = end;
}

void ClientSocket::on_payload_end() {
  if (chunk_.last == 0) {
    posted_.front().received += chunk_.length;
    return;
  }
  const Posted& front = posted_.front();
  if (chunk_.kind == MR_OK && !front.data && front.received != front.part.length)
    throw Error(MR_PROTOCOL, "a read that ends after " + std::to_string(front.received) + " of " +
                                 std::to_string(front.part.length) + " bytes");
  Posted posted = std::move(posted_.front());
  posted_.pop_front();
  --num_sent_;
  --num_awaited_;
  bytes_posted_ -= posted.part.length;
  Status status;
  if (chunk_.kind != MR_OK) status = fail(chunk_.kind, std::string(text_, text_ + chunk_.length));
  client_.part_ended(posted, std::move(status), chunk_.touched != 0);
}

// Small things are best read together, large payloads straight into their memory: no more than heads before those.
size_t ClientSocket::read_ahead() const {
  size_t first = 0;
  while (first < num_sent_ && !posted_[first].transfer) ++first;
  if (first >= num_sent_ || posted_[first].data) return kReadAhead;
  const Posted& posted = posted_[first];
  const uint64_t at_hand = payload_left() > 0 && chunk_.last == 0 ? chunk_.length : 0;
  const uint64_t left = posted.part.length - posted.received - at_hand;
  if (left > 0) return left < kLargePayload ? kReadAhead : sizeof(Chunk);
  const bool next_is_large =
      first + 1 < num_sent_ && posted_[first + 1].transfer && posted_[first + 1].part.length >= kLargePayload;
  return next_is_large ? 2 * sizeof(Chunk) : kReadAhead;
}

void ClientSocket::on_broken(const Status& why) { client_.broken(*this, why); }

void ClientSocket::after_event() { client_.after_event(); }

}  // namespace mr::tcp
