#include "tcp_server.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace mr::tcp {
namespace {

constexpr size_t kMaxAnswers = 256;      // waiting on a socket; then no more requests are read
constexpr size_t kMaxSockets = 128;      // from one peer
constexpr size_t kMaxSessions = 64;      // of one peer; it has one or two
constexpr size_t kMaxRemembered = 1024;  // socket numbers of a session; the lowest is forgotten with all below it

Status dropped(const Region& region) {
  return fail(MR_ACCESS_DENIED, "region " + std::to_string(region.id) + " was dropped");
}

}  // namespace

// ---- Requests ----

size_t ServerSocket::head_bytes(const uint8_t* head, size_t have) const {
  if (write_) return sizeof(Chunk);
  if (have < sizeof(Request)) return sizeof(Request);
  const uint8_t ndim = head[offsetof(Request, ndim)];
  if (ndim > MR_MAX_DIMS) throw Error(MR_PROTOCOL, "a request with " + std::to_string(ndim) + " dimensions");
  return sizeof(Request) + ndim * sizeof(Dimension);
}

void ServerSocket::on_head(const uint8_t* head) {
  if (!write_) return on_request(head);
  Chunk chunk;
  std::memcpy(&chunk, head, sizeof chunk);
  on_chunk(chunk);
}

void ServerSocket::on_request(const uint8_t* head) {
  Request request;
  const View view = decode_request(head, &request);
  if (request.kind == RequestKind::cancel) {
    for (auto& answer : answers_)
      if (answer.chunks.id() == request.id) answer.chunks.end_early(fail(MR_CANCELLED, "cancelled"));
    return;
  }
  const bool is_read = request.kind == RequestKind::read;
  RegionRef region;
  Status refused;
  try {
    const RegionName name{request.region, Key{{request.key[0], request.key[1]}}};
    region = host_.regions().find(name, is_read ? MR_READ : MR_WRITE, view);
  } catch (const Error& error) {
    refused = error.status();
  }
  if (!is_read) {
    write_.emplace(
        Write{request.id, std::move(region), view, request.begin, request.length, request.length, std::move(refused)});
    streaming_ = request.length >= kLargePayload;
    return;
  }
  streaming_ = false;
  if (region) {
    host_.count("tcp_bytes_served", request.length);
    answers_.emplace_back(std::move(region), view, request);
  } else {
    answers_.emplace_back(request.id, std::move(refused), false);
  }
}

// A chunk of a write: data, or the end of it.
void ServerSocket::on_chunk(const Chunk& chunk) {
  before_payload();  // it may have come in one piece with the head
  Write& write = *write_;
  if (chunk.id != write.id || chunk.zero != 0) throw Error(MR_PROTOCOL, "a chunk of no write");
  if (chunk.last == 0) {
    if (chunk.kind != MR_OK || chunk.length == 0 || chunk.length > kChunkBytes || chunk.length > write.left)
      throw Error(MR_PROTOCOL, "a chunk of " + std::to_string(chunk.length) + " bytes in a write with " +
                                   std::to_string(write.left) + " left");
    expect(write.region ? write.region->base : nullptr, write.view, write.position, chunk.length);
    write.touched |= write.region != nullptr;
    write.position += chunk.length;
    write.left -= chunk.length;
    return;
  }
  const bool aborted = chunk.kind == MR_CANCELLED;
  if (chunk.length != 0 || (chunk.kind != MR_OK && !aborted) || (write.left != 0 && !aborted))
    throw Error(MR_PROTOCOL, "a write that ends with " + std::to_string(write.left) + " bytes left");
  Status end = aborted ? fail(MR_CANCELLED, "cancelled") : std::move(write.refused);
  if (end.ok()) host_.count("tcp_bytes_taken", write.length);
  answers_.emplace_back(write.id, std::move(end), write.touched);
  write_.reset();
}

void ServerSocket::before_payload() {
  if (!write_ || !write_->region || !write_->region->dropped.load()) return;
  write_->refused = dropped(*write_->region);
  write_->region.reset();
  discard_payload();
}

size_t ServerSocket::read_ahead() const {
  const uint64_t left = write_ ? write_->left : 0;
  if (left >= kLargePayload) return sizeof(Chunk);  // the rest goes straight to memory
  return streaming_ ? sizeof(Chunk) + sizeof(Request) + sizeof(Chunk) : kReadAhead;
}

// ---- Answers ----

bool ServerSocket::wants_to_read() const { return answers_.size() < kMaxAnswers; }

void ServerSocket::gather(Gather& out) {
  for (auto& answer : answers_) {
    if (answer.region && answer.region->dropped.load()) {
      answer.chunks.lose_memory();
      answer.chunks.end_early(dropped(*answer.region));
      answer.region.reset();
    }
    if (!answer.chunks.gather(out)) return;
  }
}

void ServerSocket::sent(size_t length) {
  while (!answers_.empty()) {
    length = answers_.front().chunks.sent(length);
    if (!answers_.front().chunks.done()) return;
    answers_.pop_front();
  }
}

void ServerSocket::on_broken(const Status& why) {
  if (why.kind == MR_PROTOCOL) host_.count("tcp_malformed", 1);
  server_.gone(this);
}

// ---- All sockets of a peer ----

bool Server::use(uint64_t session, uint64_t number) {
  if (numbers_.size() == kMaxSessions && numbers_.count(session) == 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "data sockets of more than " + std::to_string(kMaxSessions) + " sessions");
  Numbers& numbers = numbers_[session];
  if (number < numbers.floor || !numbers.used.insert(number).second) return false;
  if (numbers.used.size() > kMaxRemembered) {
    numbers.floor = *numbers.used.begin() + 1;
    numbers.used.erase(numbers.used.begin());
  }
  return true;
}

bool Server::claim(uint64_t session, uint64_t number) { return sockets_.size() < kMaxSockets && use(session, number); }

void Server::adopt(uint64_t session, uint64_t number, Stream stream) {
  auto socket = std::make_shared<ServerSocket>(*this, host_, staging_, std::move(stream));
  socket->start();
  sockets_.emplace(SocketName{session, number}, std::move(socket));
}

void Server::fence(uint64_t session, uint64_t number) {
  use(session, number);
  auto found = sockets_.extract({session, number});
  if (!found.empty()) found.mapped()->close();
}

void Server::close() {
  for (auto& [name, socket] : std::exchange(sockets_, {})) socket->close();
}

void Server::put_fault(const Fault& fault) {
  for (const auto& [name, socket] : sockets_) socket->put_fault(fault);
}

void Server::gone(const ServerSocket* socket) {
  const auto found =
      std::find_if(sockets_.begin(), sockets_.end(), [&](const auto& entry) { return entry.second.get() == socket; });
  if (found == sockets_.end()) return;
  // Who waits for bytes on the other end may never learn it from its kernel: nothing is on its way that could fail.
  host_.send_on_loop(kTcpGone, Writer().put(found->first.first).put(found->first.second).take());
  sockets_.erase(found);
}

}  // namespace mr::tcp
