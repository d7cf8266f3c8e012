// TLS 1.3 with the job secret as pre-shared key: who gets in, what arrives, and how it ends.
#include "base/tls.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "check.h"

using namespace mr;
using Io = Tls::Io;
using Want = Tls::Want;

namespace {

Secret secret_of(const std::string& text) {
  return Secret(ByteView(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}
const Secret& ours() {
  static const Secret secret = secret_of("the secret of our own job");
  return secret;
}
const Secret& theirs() {
  static const Secret secret = secret_of("the secret of another job");
  return secret;
}

ByteView view_of(std::string_view text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }

bool mentions(const Status& status, const std::string& word) { return status.text.find(word) != std::string::npos; }

struct Sockets {
  Fd client, server;
};

Sockets socket_pair(int buffer_bytes = 0) {
  int fds[2];
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  for (int fd : fds)
    if (buffer_bytes > 0) CHECK_EQ(::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes), 0);
  return {Fd(fds[0]), Fd(fds[1])};
}

// Fails the test instead of hanging it.
class Deadline {
 public:
  void check(const char* doing) const {
    if (std::chrono::steady_clock::now() > end_) throw test::CheckFailed(std::string("no end of ") + doing);
  }

 private:
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::seconds(30);
};

bool over(const Io& io) { return io.closed || !io.status.ok() || io.want == Want::nothing; }

struct Connection {
  Sockets sockets;
  std::unique_ptr<Tls> client, server;
  Io client_end, server_end;

  explicit Connection(const Secret& client_secret = ours(), const Secret& server_secret = ours(), int buffer_bytes = 0)
      : sockets(socket_pair(buffer_bytes)),
        client(std::make_unique<Tls>(sockets.client.get(), false, client_secret)),
        server(std::make_unique<Tls>(sockets.server.get(), true, server_secret)) {
    Deadline deadline;
    client_end.want = server_end.want = Want::read;
    while (!over(client_end) || !over(server_end)) {
      if (!over(client_end)) client_end = client->handshake();
      if (!over(server_end)) server_end = server->handshake();
      deadline.check("the handshake");
    }
  }
  bool up() const {
    return client_end.status.ok() && server_end.status.ok() && client->established() && server->established();
  }
};

Io write_text(Tls& tls, std::string_view text) {
  const iovec part{const_cast<char*>(text.data()), text.size()};
  return tls.write(&part, 1);
}

Io read_some(Tls& tls, void* out, size_t capacity) {
  const iovec part{out, capacity};
  return tls.read(&part, 1);
}

std::string read_text(Tls& tls, size_t capacity = 100) {
  std::string out(capacity, '\0');
  out.resize(read_some(tls, out.data(), capacity).bytes);
  return out;
}

Io read_end(Tls& tls) {
  char bytes[100];
  const Io io = read_some(tls, bytes, sizeof bytes);
  CHECK_EQ(io.bytes, 0u);
  return io;
}

// Everything that the socket has ready.
Bytes take_raw(const Fd& socket) {
  Bytes out(1 << 18);
  const ssize_t n = ::recv(socket.get(), out.data(), out.size(), MSG_DONTWAIT);
  out.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return out;
}

void give_raw(const Fd& socket, ByteView bytes) {
  if (bytes.empty()) return;
  CHECK_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

Bytes random_content(size_t length, uint64_t seed) {
  Bytes out(length);
  std::mt19937_64 random(seed);
  size_t i = 0;
  for (; i + 8 <= length; i += 8) {
    const uint64_t word = random();
    std::memcpy(out.data() + i, &word, sizeof word);
  }
  for (; i < length; ++i) out[i] = static_cast<uint8_t>(random());
  return out;
}

// --- The other side played by plain OpenSSL, so that it can do what ours never would.

struct RawPeer {
  struct Key {
    std::string identity;
    Digest key;
  };
  SSL_CTX* context = nullptr;
  SSL* ssl = nullptr;
  std::unique_ptr<Key> key = std::make_unique<Key>();

  RawPeer(bool server, int version) {
    context = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    SSL_CTX_set_min_proto_version(context, version);
    SSL_CTX_set_max_proto_version(context, version);
    SSL_CTX_set_app_data(context, key.get());
  }
  ~RawPeer() {
    SSL_free(ssl);
    SSL_CTX_free(context);
    ERR_clear_error();
  }
  RawPeer(const RawPeer&) = delete;

  void offer(std::string identity, Digest secret) {
    *key = {std::move(identity), secret};
    SSL_CTX_set_psk_use_session_callback(
        context, [](SSL* ssl, const EVP_MD*, const unsigned char** id, size_t* length, SSL_SESSION** out) {
          const auto* its = static_cast<const Key*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
          const unsigned char cipher[2] = {0x13, 0x01};
          *id = reinterpret_cast<const unsigned char*>(its->identity.data());
          *length = its->identity.size();
          *out = SSL_SESSION_new();
          SSL_SESSION_set1_master_key(*out, its->key.data(), its->key.size());
          SSL_SESSION_set_cipher(*out, SSL_CIPHER_find(ssl, cipher));
          SSL_SESSION_set_protocol_version(*out, TLS1_3_VERSION);
          return 1;
        });
  }

  void show_certificate() {
    EVP_PKEY* pair = EVP_EC_gen("P-256");
    X509* certificate = X509_new();
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
    X509_gmtime_adj(X509_getm_notBefore(certificate), -3600);
    X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
    X509_set_pubkey(certificate, pair);
    X509_NAME* name = X509_get_subject_name(certificate);
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("localhost"), -1, -1,
                               0);
    X509_set_issuer_name(certificate, name);
    CHECK(X509_sign(certificate, pair, EVP_sha256()) > 0);
    CHECK_EQ(SSL_CTX_use_certificate(context, certificate), 1);
    CHECK_EQ(SSL_CTX_use_PrivateKey(context, pair), 1);
    X509_free(certificate);
    EVP_PKEY_free(pair);
  }

  // Shakes hands with `ours` until it is over for ours, and returns its end.
  Io meet(Tls& ours, int socket, bool server) {
    ssl = SSL_new(context);
    SSL_set_fd(ssl, socket);
    server ? SSL_set_accept_state(ssl) : SSL_set_connect_state(ssl);
    Deadline deadline;
    while (true) {
      ERR_clear_error();
      const int done = SSL_do_handshake(ssl);
      const Io io = ours.handshake();
      if (io.closed || (over(io) && done == 1)) return io;
      deadline.check("a handshake with OpenSSL");
    }
  }
};

Io meet_server(RawPeer& client) {
  const Sockets sockets = socket_pair();
  Tls server(sockets.server.get(), true, ours());
  const Io io = client.meet(server, sockets.client.get(), false);
  CHECK_EQ(server.established(), io.status.ok());
  return io;
}

Io meet_client(RawPeer& server) {
  const Sockets sockets = socket_pair();
  Tls client(sockets.client.get(), false, ours());
  const Io io = server.meet(client, sockets.server.get(), true);
  CHECK_EQ(client.established(), io.status.ok());
  return io;
}

// What our side says to a peer that sends these bytes first and then ends.
Io answer_to(bool server, ByteView bytes, bool end = true) {
  const Sockets sockets = socket_pair();
  Tls tls(sockets.server.get(), server, ours());
  Io io = tls.handshake();
  give_raw(sockets.client, bytes);
  if (end) ::shutdown(sockets.client.get(), SHUT_WR);
  for (int i = 0; i < 10 && !io.closed; ++i) io = tls.handshake();
  CHECK(!tls.established());
  return io;
}

// --- The pieces.

TEST(hmac_matches_rfc_4231) {
  const auto hex = [](const Digest& digest) {
    std::string out;
    char digits[3];
    for (uint8_t b : digest) std::snprintf(digits, sizeof digits, "%02x", b), out += digits;
    return out;
  };
  CHECK_EQ(hex(hmac_sha256(Bytes(20, 0x0b), view_of("Hi There"))),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmac_sha256(view_of("Jefe"), view_of("what do ya want for nothing?"))),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(hmac_sha256({}, {})), "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(equality_needs_equal_lengths) {
  CHECK(equal_constant_time(view_of("abc"), view_of("abc")));
  CHECK(!equal_constant_time(view_of("abc"), view_of("abd")));
  CHECK(!equal_constant_time(view_of("abc"), view_of("ab")));
  CHECK(equal_constant_time({}, {}));
}

TEST(random_values_differ) {
  CHECK(random_u64() != random_u64());
  CHECK(Secret::random().identity() != Secret::random().identity());
}

TEST(secret_has_an_identity_and_derives) {
  CHECK_EQ(ours().identity().size(), 32u);
  CHECK_EQ(ours().identity().find_first_not_of("0123456789abcdef"), std::string::npos);
  CHECK(ours().identity() != theirs().identity());
  CHECK(ours().derive("a") != ours().derive("b"));
  CHECK(ours().derive("a") != theirs().derive("a"));
  CHECK(ours().derive("a", view_of("b")) != ours().derive("ab"));
  const Digest expected = hmac_sha256(ours().bytes(), view_of(std::string_view("a\0b", 3)));
  CHECK(ours().derive("a", view_of("b")) == expected);
}

TEST(secret_copies_are_equal) {
  Secret copy = theirs();
  copy = ours();
  CHECK_EQ(copy.identity(), ours().identity());
  CHECK(equal_constant_time(copy.bytes(), ours().bytes()));
}

TEST(short_secret_is_refused) {
  try {
    secret_of("fifteen bytes!!");
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.status().kind, MR_CONFIG);
    CHECK(mentions(error.status(), "15 bytes"));
  }
}

// --- Who gets in.

TEST(members_get_in) {
  Connection connection;
  CHECK(connection.up());
  CHECK_EQ(write_text(*connection.client, "ping").bytes, 4u);
  CHECK_EQ(read_text(*connection.server), "ping");
  CHECK_EQ(write_text(*connection.server, "pong").bytes, 4u);
  CHECK_EQ(read_text(*connection.client), "pong");
  CHECK(connection.client->handshake().status.ok());  // again is no error
}

TEST(another_secret_on_either_side_is_refused) {
  for (const bool client_is_stranger : {true, false}) {
    Connection connection(client_is_stranger ? theirs() : ours(), client_is_stranger ? ours() : theirs());
    CHECK(!connection.client->established() && !connection.server->established());
    CHECK_EQ(connection.client_end.status.kind, MR_AUTHENTICATION);
    CHECK_EQ(connection.server_end.status.kind, MR_AUTHENTICATION);
    CHECK(mentions(connection.server_end.status, "another job"));
    CHECK(mentions(connection.client_end.status, "another job"));
    CHECK(connection.client_end.closed && connection.server_end.closed);
    CHECK_EQ(connection.server->handshake().status.kind, MR_AUTHENTICATION);  // and stays so
  }
}

TEST(a_stolen_identity_is_not_enough) {
  RawPeer client(false, TLS1_3_VERSION);
  client.offer("monarch_rdma " + ours().identity(), theirs().derive("tls psk"));
  const Io io = meet_server(client);
  CHECK_EQ(io.status.kind, MR_AUTHENTICATION);
  CHECK(mentions(io.status, "does not know the job secret"));
}

TEST(the_secret_itself_gets_an_openssl_client_in) {  // so that the refusals here mean something
  RawPeer client(false, TLS1_3_VERSION);
  client.offer("monarch_rdma " + ours().identity(), ours().derive("tls psk"));
  CHECK(meet_server(client).status.ok());
}

TEST(no_session_ticket_is_given) {
  RawPeer client(false, TLS1_3_VERSION);
  client.offer("monarch_rdma " + ours().identity(), ours().derive("tls psk"));
  const Sockets sockets = socket_pair();
  Tls server(sockets.server.get(), true, ours());
  CHECK(client.meet(server, sockets.client.get(), false).status.ok());
  CHECK_EQ(write_text(server, "x").bytes, 1u);
  char byte;
  CHECK_EQ(SSL_read(client.ssl, &byte, 1), 1);
  CHECK_EQ(SSL_SESSION_is_resumable(SSL_get_session(client.ssl)), 0);
  CHECK_EQ(SSL_session_reused(client.ssl), 1);
}

TEST(clients_without_a_secret_are_refused) {
  RawPeer client(false, TLS1_3_VERSION);
  const Io io = meet_server(client);
  CHECK_EQ(io.status.kind, MR_AUTHENTICATION);
  CHECK(mentions(io.status, "did not offer the job secret"));
}

TEST(clients_with_a_certificate_are_refused) {
  RawPeer client(false, TLS1_3_VERSION);
  client.show_certificate();
  CHECK_EQ(meet_server(client).status.kind, MR_AUTHENTICATION);
}

TEST(older_tls_is_refused) {
  for (const int version : {TLS1_VERSION, TLS1_1_VERSION, TLS1_2_VERSION}) {
    RawPeer client(false, version);
    SSL_CTX_set_security_level(client.context, 0);
    SSL_CTX_set_cipher_list(client.context, "ALL:eNULL");
    const Io io = meet_server(client);
    CHECK_EQ(io.status.kind, MR_AUTHENTICATION);
    CHECK(mentions(io.status, "does not speak TLS 1.3"));
  }
}

TEST(servers_with_a_certificate_are_refused) {
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    RawPeer server(true, version);
    server.show_certificate();
    const Io io = meet_client(server);
    CHECK_EQ(io.status.kind, MR_AUTHENTICATION);
    if (version == TLS1_3_VERSION) CHECK(mentions(io.status, "certificate"));
  }
}

TEST(other_protocols_are_refused) {
  const Io http = answer_to(true, view_of("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  CHECK_EQ(http.status.kind, MR_AUTHENTICATION);
  CHECK(mentions(http.status, "HTTP"));
  for (const char* text :
       {"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"})
    for (const bool server : {true, false}) CHECK_EQ(answer_to(server, view_of(text)).status.kind, MR_AUTHENTICATION);
}

TEST(garbage_never_gets_in) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    const Bytes bytes = random_content(random() % 3000, random());
    const Io io = answer_to(round % 2 == 0, bytes);
    CHECK(io.closed);
    CHECK(io.status.kind == MR_AUTHENTICATION || io.status.kind == MR_PEER_LOST);
  }
  CHECK_EQ(answer_to(true, Bytes(5000, 0)).status.kind, MR_AUTHENTICATION);
  CHECK_EQ(answer_to(true, Bytes(100000, 0xff)).status.kind, MR_AUTHENTICATION);
}

// The client's first flight, as a member sends it.
Bytes client_hello() {
  const Sockets sockets = socket_pair();
  Tls client(sockets.client.get(), false, ours());
  CHECK(client.handshake().want == Want::read);
  return take_raw(sockets.server);
}

TEST(truncated_handshakes_end) {
  const Bytes hello = client_hello();
  CHECK(hello.size() > 100);
  for (size_t length = 0; length <= hello.size(); ++length) {
    const Io io = answer_to(true, ByteView(hello).first(length));
    CHECK(io.closed);
    CHECK_EQ(io.status.kind, MR_PEER_LOST);
    CHECK(mentions(io.status, "handshake"));
  }
  // Without an end it just waits.
  CHECK(answer_to(true, ByteView(hello).first(hello.size() / 2), false).want == Want::read);
}

TEST(altered_handshakes_never_get_in) {
  const Bytes hello = client_hello();
  std::mt19937_64 random(11);
  for (size_t at = 0; at < hello.size(); ++at) {
    Bytes altered = hello;
    altered[at] ^= static_cast<uint8_t>(1 + random() % 255);
    const Io io = answer_to(true, altered);
    CHECK(io.closed);
    CHECK(io.status.kind == MR_AUTHENTICATION || io.status.kind == MR_PEER_LOST);
  }
}

TEST(a_replayed_client_does_not_get_in) {
  // A wire-tapped connection: all that its client sent, played to the server again.
  const Sockets near = socket_pair(), far = socket_pair();
  Tls client(near.client.get(), false, ours()), server(far.server.get(), true, ours());
  Bytes tape;
  Deadline deadline;
  while (!client.established() || !server.established()) {
    client.handshake();
    const Bytes up = take_raw(near.server);
    tape.insert(tape.end(), up.begin(), up.end());
    give_raw(far.client, up);
    server.handshake();
    give_raw(near.server, take_raw(far.client));
    deadline.check("the tapped handshake");
  }
  const Io io = answer_to(true, tape, false);
  CHECK(io.closed);
  CHECK_EQ(io.status.kind, MR_AUTHENTICATION);
}

// --- What arrives.

TEST(large_transfers_in_both_directions_at_once) {
  for (const int buffer_bytes : {0, 4096}) {
    const size_t size = buffer_bytes == 0 ? (24u << 20) + 7 : (2u << 20) + 7;
    Connection connection(ours(), ours(), buffer_bytes);
    CHECK(connection.up());
    struct Direction {
      Tls &from, &to;
      Bytes sent, got;
      size_t num_sent = 0, num_got = 0;
    } directions[2] = {{*connection.client, *connection.server, random_content(size, 1), Bytes(size)},
                       {*connection.server, *connection.client, random_content(size, 2), Bytes(size)}};
    std::mt19937_64 random(3);
    Deadline deadline;
    const auto parts_of = [&](Bytes& bytes, size_t from) {
      std::vector<iovec> parts;
      for (int i = 0; i < 4 && from < bytes.size(); ++i) {
        const size_t length = std::min<size_t>(random() % (i % 2 == 0 ? 40 : 300000), bytes.size() - from);
        parts.push_back({bytes.data() + from, length});
        from += length;
      }
      return parts;
    };
    while (directions[0].num_got < size || directions[1].num_got < size) {
      for (Direction& d : directions) {
        if (d.num_sent < size) {
          const auto parts = parts_of(d.sent, d.num_sent);
          const Io io = d.from.write(parts.data(), static_cast<int>(parts.size()));
          CHECK(io.status.ok());
          d.num_sent += io.bytes;
        }
        const auto parts = parts_of(d.got, d.num_got);
        const Io io = d.to.read(parts.data(), static_cast<int>(parts.size()));
        CHECK(io.status.ok());
        d.num_got += io.bytes;
      }
      deadline.check("the transfer");
    }
    for (Direction& d : directions) CHECK(d.sent == d.got);
  }
}

TEST(bytes_that_were_not_counted_may_be_others_the_next_time) {
  Connection connection(ours(), ours(), 4096);
  Bytes expected;
  // Until the socket is full and nothing of a message counts.
  uint8_t number = 0;
  while (true) {
    const Bytes message(1000, ++number);
    const iovec part{const_cast<uint8_t*>(message.data()), message.size()};
    const Io io = connection.client->write(&part, 1);
    CHECK(io.status.ok());
    expected.insert(expected.end(), message.begin(), message.begin() + static_cast<ptrdiff_t>(io.bytes));
    if (io.bytes == message.size()) continue;
    if (io.bytes == 0) {
      CHECK(io.want == Want::write);
      break;
    }
    // Begun: the rest of this message, and only then another.
    const Bytes rest(message.begin() + static_cast<ptrdiff_t>(io.bytes), message.end());
    const iovec rest_part{const_cast<uint8_t*>(rest.data()), rest.size()};
    CHECK_EQ(connection.client->write(&rest_part, 1).bytes, 0u);
    Bytes got(expected.size() + rest.size());
    size_t num_got = 0;
    Deadline deadline;
    bool rest_sent = false;
    while (num_got < got.size()) {
      if (!rest_sent) rest_sent = connection.client->write(&rest_part, 1).bytes == rest.size();
      num_got += read_some(*connection.server, got.data() + num_got, got.size() - num_got).bytes;
      deadline.check("the rest of a message");
    }
    expected.insert(expected.end(), rest.begin(), rest.end());
    CHECK(got == expected);
    return;
  }
  CHECK(false);  // 4096 bytes of buffer are no multiple of a message: one was cut
}

TEST(reads_scatter_and_tell_what_is_left) {
  Connection connection;
  const std::string text = "0123456789";
  CHECK_EQ(write_text(*connection.client, text).bytes, 10u);
  char a[3], b[4];
  const iovec parts[] = {{a, sizeof a}, {nullptr, 0}, {b, sizeof b}};
  CHECK_EQ(connection.server->read(parts, 3).bytes, 7u);
  CHECK_EQ(std::string(a, 3) + std::string(b, 4), "0123456");
  CHECK(connection.server->pending());
  pollfd ready{connection.sockets.server.get(), POLLIN, 0};
  CHECK_EQ(::poll(&ready, 1, 0), 0);  // which is why pending() exists
  CHECK_EQ(read_text(*connection.server), "789");
  const Io io = read_some(*connection.server, a, sizeof a);
  CHECK(io.bytes == 0 && io.want == Want::read);
  CHECK(!connection.server->pending());
}

TEST(a_half_record_is_not_pending) {
  const Sockets near = socket_pair(), far = socket_pair();
  Connection connection;
  CHECK_EQ(write_text(*connection.client, std::string(1000, 'a')).bytes, 1000u);
  CHECK_EQ(write_text(*connection.client, std::string(1000, 'b')).bytes, 1000u);
  // The socket gives the first record and half of the second: move the rest aside.
  Bytes raw = take_raw(connection.sockets.server);
  const size_t first = raw.size() * 3 / 4;
  give_raw(connection.sockets.client, ByteView(raw).first(first));
  CHECK_EQ(read_text(*connection.server, 1000), std::string(1000, 'a'));
  for (int i = 0; connection.server->pending(); ++i) {
    CHECK(i < 3);  // it must not be told to try for ever
    read_text(*connection.server, 1);
  }
  give_raw(connection.sockets.client, ByteView(raw).subspan(first));
  CHECK_EQ(read_text(*connection.server, 1000), std::string(1000, 'b'));
}

TEST(nothing_asked_nothing_done) {
  Connection connection;
  CHECK_EQ(write_text(*connection.client, "").bytes, 0u);
  CHECK_EQ(write_text(*connection.client, "x").bytes, 1u);
  const Io io = read_some(*connection.server, nullptr, 0);
  CHECK(io.bytes == 0 && !io.closed && io.status.ok());
  CHECK_EQ(read_text(*connection.server), "x");
}

TEST(io_before_the_handshake_is_an_error) {
  const Sockets sockets = socket_pair();
  Tls client(sockets.client.get(), false, ours());
  CHECK_THROWS(Error, write_text(client, "x"));
  CHECK_THROWS(Error, read_text(client));
  CHECK_THROWS(Error, client.exporter("EXPORTER-test"));
}

TEST(keys_change_on_the_way) {
  Connection connection;
  connection.client->rekey_after(2);
  connection.server->rekey_after(3);
  for (int i = 0; i < 40; ++i) {
    const std::string text = "message " + std::to_string(i);
    CHECK_EQ(write_text(*connection.client, text).bytes, text.size());
    CHECK_EQ(read_text(*connection.server), text);
    CHECK_EQ(write_text(*connection.server, text).bytes, text.size());
    CHECK_EQ(read_text(*connection.client), text);
  }
}

TEST(sending_keys_are_renewed) {
  static int key_updates;
  key_updates = 0;
  RawPeer client(false, TLS1_3_VERSION);
  client.offer("monarch_rdma " + ours().identity(), ours().derive("tls psk"));
  SSL_CTX_set_msg_callback(client.context, [](int, int, int type, const void* data, size_t length, SSL*, void*) {
    if (type == SSL3_RT_HANDSHAKE && length > 0 && *static_cast<const uint8_t*>(data) == SSL3_MT_KEY_UPDATE)
      ++key_updates;
  });
  const Sockets sockets = socket_pair();
  Tls server(sockets.server.get(), true, ours());
  CHECK(client.meet(server, sockets.client.get(), false).status.ok());
  server.rekey_after(3);
  for (int i = 0; i < 10; ++i) {
    char byte;
    CHECK_EQ(write_text(server, "x").bytes, 1u);
    CHECK_EQ(SSL_read(client.ssl, &byte, 1), 1);
  }
  CHECK_EQ(key_updates, 3);
}

TEST(a_peer_may_ask_for_new_keys) {
  RawPeer client(false, TLS1_3_VERSION);
  client.offer("monarch_rdma " + ours().identity(), ours().derive("tls psk"));
  const Sockets sockets = socket_pair();
  Tls server(sockets.server.get(), true, ours());
  CHECK(client.meet(server, sockets.client.get(), false).status.ok());
  CHECK_EQ(SSL_key_update(client.ssl, SSL_KEY_UPDATE_REQUESTED), 1);
  CHECK_EQ(SSL_write(client.ssl, "hello", 5), 5);
  CHECK_EQ(read_text(server), "hello");
  CHECK_EQ(write_text(server, "world").bytes, 5u);
  char text[5];
  CHECK_EQ(SSL_read(client.ssl, text, 5), 5);
  CHECK_EQ(std::string(text, 5), "world");
}

TEST(exported_keys_are_one_per_session_and_label) {
  Connection one, other;
  const auto key = one.client->exporter("EXPORTER-test");
  CHECK(key == one.server->exporter("EXPORTER-test"));
  CHECK(key != one.client->exporter("EXPORTER-other"));
  CHECK(key != other.client->exporter("EXPORTER-test"));
}

// --- How it ends.

TEST(one_direction_may_end_before_the_other) {
  Connection connection;
  CHECK_EQ(write_text(*connection.client, "last").bytes, 4u);
  connection.client->close_notify();
  CHECK_EQ(read_text(*connection.server), "last");
  CHECK(!read_some(*connection.server, nullptr, 0).closed);
  CHECK(connection.server->pending());  // the goodbye was in the same bytes, and no event will tell
  const Io end = read_end(*connection.server);
  CHECK(end.closed && end.status.ok());
  CHECK(!connection.server->pending());
  CHECK_EQ(write_text(*connection.server, "still here").bytes, 10u);
  CHECK_EQ(read_text(*connection.client), "still here");
  CHECK_EQ(write_text(*connection.client, "more").status.kind, MR_PEER_LOST);
  connection.server->close_notify();
  CHECK(read_end(*connection.client).closed);
  CHECK(read_end(*connection.server).closed);  // again
}

TEST(a_peer_that_vanishes_is_not_one_that_says_goodbye) {
  Connection connection;
  CHECK_EQ(write_text(*connection.client, "last").bytes, 4u);
  connection.sockets.client.reset();
  CHECK_EQ(read_text(*connection.server), "last");
  const Io end = read_end(*connection.server);
  CHECK(end.closed);
  CHECK_EQ(end.status.kind, MR_PEER_LOST);
}

TEST(writing_to_a_vanished_peer_raises_no_signal) {
  Connection connection;
  connection.sockets.server.reset();
  const Io io = write_text(*connection.client, "anyone?");  // SIGPIPE would end this program
  CHECK(io.closed);
  CHECK_EQ(io.status.kind, MR_PEER_LOST);
  CHECK_EQ(io.status.sys_errno, EPIPE);
  CHECK_EQ(write_text(*connection.client, "anyone?").status.kind, MR_PEER_LOST);
  connection.client->close_notify();
}

TEST(a_peer_that_vanishes_in_the_handshake) {
  Sockets sockets = socket_pair();
  Tls client(sockets.client.get(), false, ours());
  CHECK(client.handshake().want == Want::read);
  sockets.server.reset();
  const Io io = client.handshake();
  CHECK(io.closed);
  CHECK_EQ(io.status.kind, MR_PEER_LOST);
  CHECK_EQ(client.handshake().status.kind, MR_PEER_LOST);
}

TEST(altered_bytes_are_noticed) {
  for (const size_t at : {0u, 3u, 5u, 20u, 60u}) {
    Connection connection;
    CHECK_EQ(write_text(*connection.client, std::string(100, 'x')).bytes, 100u);
    Bytes raw = take_raw(connection.sockets.server);
    raw[at] ^= 1;
    give_raw(connection.sockets.client, raw);
    ::shutdown(connection.sockets.client.get(), SHUT_WR);
    const Io io = read_end(*connection.server);
    CHECK(io.closed);
    CHECK(io.status.kind == MR_PROTOCOL || (at == 3 && io.status.kind == MR_PEER_LOST));  // 3: the length grew
    CHECK_EQ(read_end(*connection.server).status.kind, io.status.kind);
    connection.server->close_notify();
  }
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
