// What OpenSSL is used for: HMAC-SHA256 proofs, and TLS 1.3 in pre-shared-key mode on a non-blocking socket.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "wire.h"

namespace mr {

using Digest = std::array<uint8_t, 32>;

void random_bytes(void* out, size_t length);
uint64_t random_u64();  // never 0
Digest hmac_sha256(ByteView key, ByteView data);
bool equal_constant_time(ByteView a, ByteView b);  // false where the lengths differ

// The job's secret. The identity tells jobs apart on the wire and says nothing about the secret.
class Secret {
 public:
  explicit Secret(ByteView bytes);  // MR_CONFIG under 16 bytes
  static Secret random();
  ~Secret();  // wipes
  Secret(const Secret&) = default;
  Secret& operator=(Secret other) noexcept;

  ByteView bytes() const { return bytes_; }
  Digest derive(std::string_view label, ByteView context = {}) const;  // HMAC(secret, label || 0 || context)
  const std::string& identity() const { return identity_; }            // 32 hex digits

 private:
  Bytes bytes_;
  std::string identity_;
};

// One side of a TLS 1.3 PSK (with (EC)DHE, so recorded traffic stays closed) connection over a connected non-blocking
// socket that the caller owns. Certificates, older versions, session tickets and renegotiation are off.
class Tls {
 public:
  enum class Want { nothing, read, write };  // what the socket must be ready for before the next try
  struct Io {
    size_t bytes = 0;
    Want want = Want::nothing;
    bool closed = false;  // orderly end (status is ok), or the connection broke (then status says how)
    Status status;
  };

  Tls(int socket, bool server, const Secret& secret);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // Goes on with the handshake: want == nothing and status ok means established. MR_AUTHENTICATION where the other
  // side does not know the secret or offers anything but TLS 1.3 PSK; MR_PEER_LOST where it just ended.
  Io handshake();
  bool established() const;
  // Scatter and gather, like readv and writev.
  Io read(const iovec* parts, int count);
  // A byte that was counted is on its way. Bytes that were not are offered again by the next call, before any others,
  // once a part of them was counted (as on a plain socket, where a frame that has begun must be ended).
  Io write(const iovec* parts, int count);
  bool pending() const;                           // received bytes wait inside: epoll will not tell
  Digest exporter(std::string_view label) const;  // RFC 8446 section 7.5, bound to this session
  void close_notify();                            // ends our direction; the other may go on
  // New sending keys after that many records; the default stays far below the limit of RFC 8446 section 5.5.
  void rekey_after(uint64_t records);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mr
