#include "tcp_wire.h"

#include <cstddef>
#include <cstring>
#include <string_view>

namespace mr::tcp {
namespace {

template <typename T>
ByteView bytes_of(const T& value, size_t length = sizeof(T)) {
  return {reinterpret_cast<const uint8_t*>(&value), length};
}

ByteView bytes_of(std::string_view text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }

}  // namespace

Digest client_proof(const Digest& session_key, const Hello& hello, const Digest& binding) {
  Writer said;
  said.raw(bytes_of(std::string_view("bulk client"))).raw(bytes_of(hello, offsetof(Hello, proof))).raw(binding);
  return hmac_sha256(session_key, said.bytes());
}

Digest server_proof(const Digest& session_key, const Hello& hello, const Welcome& welcome, const Digest& binding) {
  Writer said;
  said.raw(bytes_of(std::string_view("bulk server"))).raw(bytes_of(hello));
  said.raw(bytes_of(welcome, offsetof(Welcome, proof))).raw(binding);
  return hmac_sha256(session_key, said.bytes());
}

size_t encode_request(RequestKind kind, uint32_t id, const RegionName& name, const View& view, uint64_t begin,
                      uint64_t length, uint8_t* out) {
  Request head;
  head.kind = kind;
  head.ndim = static_cast<uint8_t>(view.dims().size());
  head.id = id;
  head.region = name.id;
  head.key[0] = name.key.word[0];
  head.key[1] = name.key.word[1];
  head.begin = begin;
  head.length = length;
  head.offset = view.offset();
  head.run = view.run();
  std::memcpy(out, &head, sizeof head);
  out += sizeof head;
  for (const auto& dim : view.dims()) {
    const Dimension dimension{dim.count, dim.stride};
    std::memcpy(out, &dimension, sizeof dimension);
    out += sizeof dimension;
  }
  return request_bytes(view);
}

View decode_request(const uint8_t* data, Request* out) {
  std::memcpy(out, data, sizeof *out);
  if (out->zero != 0) throw Error(MR_PROTOCOL, "a request with unknown flags");
  if (out->kind == RequestKind::cancel) {
    if (out->ndim != 0) throw Error(MR_PROTOCOL, "a cancel with dimensions");
    return {};
  }
  if (out->kind != RequestKind::read && out->kind != RequestKind::write)
    throw Error(MR_PROTOCOL, "a request of unknown kind " + std::to_string(static_cast<int>(out->kind)));
  mr_view raw{};
  raw.offset = out->offset;
  raw.run = out->run;
  raw.ndim = out->ndim;
  for (uint32_t i = 0; i < raw.ndim; ++i) {
    Dimension dimension;
    std::memcpy(&dimension, data + sizeof *out + i * sizeof dimension, sizeof dimension);
    raw.count[i] = dimension.count;
    raw.stride[i] = dimension.stride;
  }
  View view;
  try {
    view = View::from(raw);
  } catch (const Error& error) {
    throw Error(MR_PROTOCOL, error.status().text);
  }
  if (out->length > kPartBytes || out->begin > view.bytes() || out->length > view.bytes() - out->begin)
    throw Error(MR_PROTOCOL, "a request for bytes outside its own view");
  return view;
}

}  // namespace mr::tcp
