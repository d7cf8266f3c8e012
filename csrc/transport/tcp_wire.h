// What crosses a data socket of the tcp lane. One side opens it and sends requests, the other answers them in order:
//
//   client                                     server
//   Hello                                ->
//                                       <-     Welcome
//   Request{read} Dimension*             ->
//                                       <-     (Chunk bytes)*, the last one marked; or Chunk{kind} text
//   Request{write} Dimension* (Chunk bytes)*   ->
//                                       <-     Chunk{kind, last} text
//   Request{cancel, id of a read}        ->    no answer of its own: the read's ends early
//
// Little-endian, no padding. Neither side allocates by a number that it received.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../base/tls.h"
#include "../memory/region.h"
#include "../memory/view.h"

namespace mr::tcp {

constexpr uint32_t kMagic = 0x3142524d;  // "MRB1"
constexpr uint32_t kVersion = 1;

constexpr uint64_t kPartBytes = 4u << 20;   // the most that one request moves; a multiple of 64
constexpr uint64_t kChunkBytes = 1u << 20;  // the most behind one Chunk
constexpr size_t kMaxText = 1024;

struct Hello {
  uint32_t magic = kMagic, version = kVersion;
  uint64_t session = 0;  // of the control stream
  uint64_t number = 0;   // of the socket, never used twice in a session
  uint8_t nonce[16] = {};
  Digest proof{};
};
static_assert(sizeof(Hello) == 72 && std::is_trivially_copyable_v<Hello>);

struct Welcome {
  uint32_t magic = kMagic, version = kVersion;
  uint8_t nonce[16] = {};
  Digest proof{};
};
static_assert(sizeof(Welcome) == 56 && std::is_trivially_copyable_v<Welcome>);

// Over everything that was said, and the TLS session it was said in: neither can be used on another connection.
Digest client_proof(const Digest& session_key, const Hello& hello, const Digest& binding);
Digest server_proof(const Digest& session_key, const Hello& hello, const Welcome& welcome, const Digest& binding);
constexpr const char* kBindingLabel = "monarch_rdma bulk";

enum class RequestKind : uint8_t { read = 1, write = 2, cancel = 3 };

// Bytes [begin, begin + length) of the logical order of a view of a region.
struct Request {
  RequestKind kind = RequestKind::read;
  uint8_t ndim = 0;
  uint16_t zero = 0;
  uint32_t id = 0;
  uint64_t region = 0, key[2] = {};
  uint64_t begin = 0, length = 0;
  uint64_t offset = 0, run = 0;
};
static_assert(sizeof(Request) == 64 && std::is_trivially_copyable_v<Request>);

struct Dimension {
  uint64_t count, stride;
};
constexpr size_t kMaxRequestBytes = sizeof(Request) + MR_MAX_DIMS * sizeof(Dimension);

struct Chunk {
  uint32_t id = 0;
  uint32_t length = 0;  // bytes that follow: data where kind is MR_OK, else a sentence
  uint8_t kind = MR_OK;
  uint8_t last = 0;
  uint8_t touched = 0;  // of a refused write: some of its bytes have reached the region
  uint8_t zero = 0;
};
static_assert(sizeof(Chunk) == 12 && std::is_trivially_copyable_v<Chunk>);

inline size_t request_bytes(const View& view) { return sizeof(Request) + view.dims().size() * sizeof(Dimension); }
// Writes the request with its dimensions; `out` has room for kMaxRequestBytes.
size_t encode_request(RequestKind kind, uint32_t id, const RegionName& name, const View& view, uint64_t begin,
                      uint64_t length, uint8_t* out);
// The inverse, for a whole request; throws MR_PROTOCOL where it can't be one of an honest client.
View decode_request(const uint8_t* data, Request* out);

}  // namespace mr::tcp
