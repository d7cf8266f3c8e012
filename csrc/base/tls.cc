#include "tls.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <new>

namespace mr {
namespace {

constexpr size_t kRecordBytes = 16384;     // the most plaintext that one TLS record holds
constexpr size_t kBurstBytes = 4 * 16384;  // records are encrypted up to here before one send takes them all
constexpr size_t kReadBufferBytes = 4 * 16384 + 1024;
constexpr uint64_t kRekeyRecords = 1u << 22;  // AES-GCM: at most 2^24.5 full records under one key

constexpr const char* kCipherSuite = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kCipherId[2] = {0x13, 0x01};

std::string hex(ByteView bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string out;
  for (uint8_t b : bytes) {
    out += digits[b >> 4];
    out += digits[b & 15];
  }
  return out;
}

std::string openssl_reason(unsigned long error) {
  const char* text = ERR_reason_error_string(error);
  return text != nullptr ? text : "error " + std::to_string(error);
}

}  // namespace

void random_bytes(void* out, size_t length) {
  auto* p = static_cast<uint8_t*>(out);
  while (length > 0) {
    const ssize_t got = ::getrandom(p, length, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(MR_RESOURCE_EXHAUSTED, "the system has no random bytes", errno);
    p += got;
    length -= static_cast<size_t>(got);
  }
}

uint64_t random_u64() {
  uint64_t value = 0;
  while (value == 0) random_bytes(&value, sizeof value);
  return value;
}

Digest hmac_sha256(ByteView key, ByteView data) {
  static const uint8_t nothing = 0;  // OpenSSL takes a null key to mean something else than an empty one
  Digest out{};
  unsigned int length = 0;
  if (key.size() > INT32_MAX || HMAC(EVP_sha256(), key.empty() ? &nothing : key.data(), static_cast<int>(key.size()),
                                     data.data(), data.size(), out.data(), &length) == nullptr) {
    ERR_clear_error();
    throw Error(MR_CONFIG, "OpenSSL can't compute HMAC-SHA256 on this host");
  }
  return out;
}

bool equal_constant_time(ByteView a, ByteView b) {
  return a.size() == b.size() && (a.empty() || CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0);
}

Secret::Secret(ByteView bytes) : bytes_(bytes.begin(), bytes.end()) {
  if (bytes_.size() < 16)
    throw Error(MR_CONFIG, "the job secret has " + std::to_string(bytes_.size()) + " bytes, at least 16 are needed");
  identity_ = hex(ByteView(derive("job id")).first(16));
}

Secret Secret::random() {
  Digest bytes;
  random_bytes(bytes.data(), bytes.size());
  Secret secret{ByteView(bytes)};
  OPENSSL_cleanse(bytes.data(), bytes.size());
  return secret;
}

Secret::~Secret() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

Secret& Secret::operator=(Secret other) noexcept {
  bytes_.swap(other.bytes_);
  identity_.swap(other.identity_);
  return *this;
}

Digest Secret::derive(std::string_view label, ByteView context) const {
  Writer input;
  input.raw({reinterpret_cast<const uint8_t*>(label.data()), label.size()}).put<uint8_t>(0).raw(context);
  return hmac_sha256(bytes_, input.bytes());
}

struct Tls::Impl {
  int socket;
  bool server;
  std::string identity;
  Digest key{};
  SSL* ssl = nullptr;

  Bytes outgoing;  // encrypted; from `sent` on the socket has not taken it
  size_t sent = 0;
  int send_errno = 0, recv_errno = 0;
  bool socket_ended = false;
  bool up = false;        // the handshake is over and the other side has proved the secret
  bool stranger = false;  // a pre-shared key was offered that is not ours
  bool drained = true;    // OpenSSL asked for more bytes, so what it holds is no whole record
  bool closing = false;   // we said goodbye
  bool held = false;      // the last byte of the caller's data is in `outgoing`, and not counted yet
  bool told = false;      // the caller has seen `end`
  uint64_t records = 0, rekey = kRekeyRecords;
  Io end;  // how reading ended, once it is closed

  Impl(int socket, bool server, const Secret& secret);
  ~Impl();

  bool stalled() const { return sent < outgoing.size(); }
  bool flush();
  bool seal(const uint8_t* data, size_t length);
  Io cut_off() const;
  Io unsealed() const;
  Io why_not(int result);
  std::string handshake_fault(unsigned long error) const;
  SSL_SESSION* session() const;

  static SSL_CTX* context(bool server);
  static int offer_key(SSL* ssl, const EVP_MD* digest, const unsigned char** id, size_t* length, SSL_SESSION** out);
  static int find_key(SSL* ssl, const unsigned char* id, size_t length, SSL_SESSION** out);
  static int refuse_certificate(int, X509_STORE_CTX*) { return 0; }
  static const BIO_METHOD* socket_bio();
  static int bio_read(BIO* bio, char* out, size_t capacity, size_t* got);
  static int bio_write(BIO* bio, const char* data, size_t length, size_t* written);
  static long bio_control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH; }
};

// --- The socket under OpenSSL. Its own socket BIO writes with write(), which raises SIGPIPE in the user's program.
// This one reads from the socket, and writes to a buffer that flush() sends: so a record once made is never made again,
// and many go in one system call.

const BIO_METHOD* Tls::Impl::socket_bio() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "monarch_rdma socket");
    if (made == nullptr || BIO_meth_set_read_ex(made, bio_read) != 1 || BIO_meth_set_write_ex(made, bio_write) != 1 ||
        BIO_meth_set_ctrl(made, bio_control) != 1)
      throw Error(MR_RESOURCE_EXHAUSTED, "OpenSSL has no memory");
    return made;
  }();
  return method;
}

int Tls::Impl::bio_read(BIO* bio, char* out, size_t capacity, size_t* got) {
  auto* self = static_cast<Impl*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  ssize_t n;
  do n = ::recv(self->socket, out, capacity, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  *got = n > 0 ? static_cast<size_t>(n) : 0;
  if (n > 0) return 1;
  if (n == 0)
    self->socket_ended = true;
  else if (errno == EAGAIN || errno == EWOULDBLOCK)
    BIO_set_retry_read(bio);
  else
    self->recv_errno = errno;
  return 0;
}

int Tls::Impl::bio_write(BIO* bio, const char* data, size_t length, size_t* written) {
  auto* self = static_cast<Impl*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  try {
    self->outgoing.insert(self->outgoing.end(), data, data + length);
  } catch (const std::bad_alloc&) {  // no exception may pass through C
    self->send_errno = ENOMEM;
    return 0;
  }
  *written = length;
  return 1;
}

// False where the socket is broken. The rest of what it does not take now stays: stalled().
bool Tls::Impl::flush() {
  while (send_errno == 0 && stalled()) {
    const ssize_t n = ::send(socket, outgoing.data() + sent, outgoing.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0)
      sent += static_cast<size_t>(n);
    else if (errno == EAGAIN || errno == EWOULDBLOCK)
      return true;
    else if (errno != EINTR)
      send_errno = errno;
  }
  outgoing.clear();
  sent = 0;
  return send_errno == 0;
}

// --- The pre-shared key.

SSL_CTX* Tls::Impl::context(bool server) {
  auto make = [](bool server) {
    SSL_CTX* made = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    if (made == nullptr || SSL_CTX_set_min_proto_version(made, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_max_proto_version(made, TLS1_3_VERSION) != 1 || SSL_CTX_set_ciphersuites(made, kCipherSuite) != 1 ||
        SSL_CTX_set_num_tickets(made, 0) != 1) {
      const std::string why = openssl_reason(ERR_peek_error());
      ERR_clear_error();
      SSL_CTX_free(made);
      throw Error(MR_CONFIG, std::string("OpenSSL on this host offers no TLS 1.3 with ") + kCipherSuite + ": " + why);
    }
    // Without SSL_OP_ALLOW_NO_DHE_KEX a key exchange is always part of the handshake.
    SSL_CTX_clear_options(made, SSL_OP_ALLOW_NO_DHE_KEX | SSL_OP_ENABLE_MIDDLEBOX_COMPAT);
    SSL_CTX_set_options(made, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_session_cache_mode(made, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(made, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_AUTO_RETRY);
    SSL_CTX_set_read_ahead(made, 1);
    SSL_CTX_set_default_read_buffer_len(made, kReadBufferBytes);
    if (server) {
      SSL_CTX_set_psk_find_session_callback(made, find_key);
    } else {
      SSL_CTX_set_psk_use_session_callback(made, offer_key);
      SSL_CTX_set_verify(made, SSL_VERIFY_PEER, refuse_certificate);
    }
    return made;
  };
  // Costly to make and never changed after; they live as long as the process.
  static SSL_CTX* const client_side = make(false);
  static SSL_CTX* const server_side = make(true);
  return server ? server_side : client_side;
}

SSL_SESSION* Tls::Impl::session() const {
  SSL_SESSION* made = SSL_SESSION_new();
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kCipherId);
  if (made != nullptr && cipher != nullptr && SSL_SESSION_set1_master_key(made, key.data(), key.size()) == 1 &&
      SSL_SESSION_set_cipher(made, cipher) == 1 && SSL_SESSION_set_protocol_version(made, TLS1_3_VERSION) == 1)
    return made;
  SSL_SESSION_free(made);
  return nullptr;
}

int Tls::Impl::offer_key(SSL* ssl, const EVP_MD*, const unsigned char** id, size_t* length, SSL_SESSION** out) {
  const auto* self = static_cast<const Impl*>(SSL_get_app_data(ssl));
  *id = reinterpret_cast<const unsigned char*>(self->identity.data());
  *length = self->identity.size();
  *out = self->session();
  return *out != nullptr;
}

int Tls::Impl::find_key(SSL* ssl, const unsigned char* id, size_t length, SSL_SESSION** out) {
  auto* self = static_cast<Impl*>(SSL_get_app_data(ssl));
  *out = nullptr;
  const ByteView ours(reinterpret_cast<const uint8_t*>(self->identity.data()), self->identity.size());
  if (!equal_constant_time({id, length}, ours)) {
    self->stranger = true;
    return 1;  // not found; without a certificate the handshake ends here
  }
  *out = self->session();
  return *out != nullptr;
}

Tls::Impl::Impl(int socket, bool server, const Secret& secret)
    : socket(socket), server(server), identity("monarch_rdma " + secret.identity()), key(secret.derive("tls psk")) {
  ERR_clear_error();
  ssl = SSL_new(context(server));
  BIO* bio = ssl == nullptr ? nullptr : BIO_new(socket_bio());
  if (bio == nullptr) {
    SSL_free(ssl);
    ERR_clear_error();
    throw Error(MR_RESOURCE_EXHAUSTED, "OpenSSL has no memory for another connection");
  }
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl, bio, bio);
  SSL_set_app_data(ssl, this);
  server ? SSL_set_accept_state(ssl) : SSL_set_connect_state(ssl);
}

Tls::Impl::~Impl() {
  SSL_free(ssl);
  OPENSSL_cleanse(key.data(), key.size());
}

// --- What went wrong.

Tls::Io Tls::Impl::cut_off() const {
  return {0, Want::nothing, true, fail(MR_PEER_LOST, "the connection broke", send_errno)};
}

Tls::Io Tls::Impl::unsealed() const {
  if (send_errno != 0) return cut_off();
  const std::string why = openssl_reason(ERR_peek_error());
  ERR_clear_error();
  return {0, Want::nothing, true, fail(MR_PROTOCOL, "the connection can't encrypt any more (OpenSSL: " + why + ")")};
}

std::string Tls::Impl::handshake_fault(unsigned long error) const {
  const int reason = ERR_GET_REASON(error);
  switch (reason) {
    case SSL_R_HTTP_REQUEST:
    case SSL_R_HTTPS_PROXY_REQUEST:
      return "it spoke HTTP";
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_BAD_LEGACY_VERSION:
    case SSL_R_RECORD_LENGTH_MISMATCH:
      return "it does not speak TLS 1.3";
    case SSL_R_BINDER_DOES_NOT_VERIFY:
      return "it does not know the job secret";
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
      return "it showed a certificate instead of the job secret";
    default:
      break;
  }
  if (server && stranger) return "it has the secret of another job";
  if (server && (reason == SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM || reason == SSL_R_NO_SHARED_CIPHER))
    return "it did not offer the job secret";
  if (reason >= SSL_AD_REASON_OFFSET) return "it refused our job secret, so it is of another job or no engine";
  return "its TLS handshake is malformed";
}

// Why a call of OpenSSL did not succeed. Anything but "not yet" is kept in `end`.
Tls::Io Tls::Impl::why_not(int result) {
  const int code = SSL_get_error(ssl, result);
  if (code == SSL_ERROR_WANT_READ) {
    drained = true;
    return {0, Want::read, false, {}};
  }
  end.closed = true;
  const std::string when = up ? "" : " during the TLS handshake";
  if (recv_errno != 0) {
    end.status = fail(MR_PEER_LOST, "the connection broke" + when, recv_errno);
  } else if (socket_ended || (!up && code == SSL_ERROR_ZERO_RETURN)) {
    end.status = fail(MR_PEER_LOST, "the other side ended the connection" + (up ? " without saying goodbye" : when));
  } else if (code != SSL_ERROR_ZERO_RETURN) {
    const unsigned long error = ERR_peek_error();
    const std::string detail = " (OpenSSL: " + openssl_reason(error) + ")";
    end.status =
        up ? fail(MR_PROTOCOL, "the other side's encrypted data was altered or malformed" + detail)
           : fail(MR_AUTHENTICATION, "the other side is no member of this job: " + handshake_fault(error) + detail);
  }
  ERR_clear_error();
  return end;
}

// --- One side of a connection.

Tls::Tls(int socket, bool server, const Secret& secret) : impl_(std::make_unique<Impl>(socket, server, secret)) {}
Tls::~Tls() = default;

Tls::Io Tls::handshake() {
  Impl& self = *impl_;
  if (self.end.closed) return self.end;
  Io io;
  if (!self.up) {
    ERR_clear_error();
    const int result = SSL_do_handshake(self.ssl);
    if (result != 1) {
      io = self.why_not(result);
    } else if (SSL_session_reused(self.ssl) != 1) {  // established by something else than the key: never
      self.end = {0, Want::nothing, true, fail(MR_AUTHENTICATION, "the other side did not use the job secret")};
      io = self.end;
    } else {
      self.up = true;
      self.drained = false;  // the first data may have come along with the last of the handshake
      OPENSSL_cleanse(self.key.data(), self.key.size());
    }
  }
  if (!self.flush() && !io.closed) io = self.end = self.cut_off();
  if (self.stalled() && !io.closed) io.want = Want::write;
  return io;
}

bool Tls::established() const { return impl_->up; }

Tls::Io Tls::read(const iovec* parts, int count) {
  Impl& self = *impl_;
  Io io;
  if (!self.up) throw Error(MR_CONFIG, "read from a TLS connection before its handshake");
  bool asked = false;
  for (int i = 0; i < count && io.want == Want::nothing; ++i) {
    auto* out = static_cast<uint8_t*>(parts[i].iov_base);
    size_t left = parts[i].iov_len;
    asked |= left > 0;
    while (left > 0 && !self.end.closed && io.want == Want::nothing) {
      size_t got = 0;
      ERR_clear_error();
      const int result = SSL_read_ex(self.ssl, out, left, &got);
      if (result == 1)
        self.drained = false;
      else
        io.want = self.why_not(result).want;
      out += got, left -= got, io.bytes += got;
    }
  }
  self.flush();  // an answer to a key update
  if (io.bytes > 0) io.want = Want::nothing;
  if (io.bytes > 0 || !asked || !self.end.closed) return io;
  self.told = true;
  return self.end;
}

bool Tls::Impl::seal(const uint8_t* data, size_t length) {
  ERR_clear_error();
  if (++records % rekey == 0) SSL_key_update(ssl, SSL_KEY_UPDATE_NOT_REQUESTED);
  size_t written = 0;
  return SSL_write_ex(ssl, data, length, &written) == 1 && written == length;
}

Tls::Io Tls::write(const iovec* parts, int count) {
  Impl& self = *impl_;
  if (!self.up) throw Error(MR_CONFIG, "write to a TLS connection before its handshake");
  if (self.closing) return {0, Want::nothing, true, fail(MR_PEER_LOST, "the connection was ended on this side")};
  if (!self.flush()) return self.cut_off();
  if (self.stalled()) return {0, Want::write, false, {}};
  Io io;
  bool full = false;
  for (int i = 0; i < count && !full; ++i) {
    const auto* data = static_cast<const uint8_t*>(parts[i].iov_base);
    size_t left = parts[i].iov_len;
    if (self.held && left > 0) {
      self.held = false;
      ++data, --left, ++io.bytes;
    }
    while (left > 0 && !full) {
      const size_t length = std::min(left, kRecordBytes);
      if (!self.seal(data, length)) return self.unsealed();
      data += length, left -= length, io.bytes += length;
      if (self.outgoing.size() < kBurstBytes) continue;
      if (!self.flush()) return self.cut_off();
      full = self.stalled();
    }
  }
  if (!self.flush()) return self.cut_off();
  if (self.stalled()) {
    // Nobody would ask again for the sake of what waits in here, were all the bytes counted.
    self.held = true;
    if (--io.bytes == 0) io.want = Want::write;
  }
  return io;
}

bool Tls::pending() const {
  const Impl& self = *impl_;
  return self.up && (self.end.closed ? !self.told : !self.drained && SSL_has_pending(self.ssl) == 1);
}

Digest Tls::exporter(std::string_view label) const {
  Digest out{};
  ERR_clear_error();
  if (!impl_->up ||
      SSL_export_keying_material(impl_->ssl, out.data(), out.size(), label.data(), label.size(), nullptr, 0, 0) != 1) {
    ERR_clear_error();
    throw Error(MR_CONFIG, "no key can be exported from a TLS connection before its handshake");
  }
  return out;
}

void Tls::close_notify() {
  Impl& self = *impl_;
  if (!self.up || self.closing || !self.end.status.ok()) return;
  self.closing = true;
  ERR_clear_error();
  SSL_shutdown(self.ssl);
  ERR_clear_error();
  self.flush();
}

void Tls::rekey_after(uint64_t records) { impl_->rekey = std::max<uint64_t>(1, records); }

}  // namespace mr
