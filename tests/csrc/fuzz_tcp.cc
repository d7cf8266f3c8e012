// Mutated byte streams against the three parsers of the tcp lane: the greeting at the door, requests at the server,
// answers at the client. fuzz_tcp SECONDS [SEED]; a failure says the seed. Whatever arrives, nothing may crash, hang,
// be allocated by a number that was received, or be read or written outside the region (or the local view) meant; and
// every operation ends once. Streams that are not mutated are checked to work, so that the rest means something.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <random>

#include "link_host.h"
#include "transport/tcp_link.h"

namespace {

constexpr size_t kMaxAllocation = 1 << 20;
std::atomic<bool> g_limited{false};

}  // namespace

void* operator new(size_t length) {
  if (g_limited && length > kMaxAllocation) {
    std::fprintf(stderr, "an allocation of %zu bytes\n", length);
    std::abort();
  }
  if (void* p = std::malloc(length)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace mr {
namespace {

using Random = std::mt19937_64;
using test::TestHost;

uint64_t g_seed = 0;

void demand(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz_tcp: %s (seed %llu)\n", what, static_cast<unsigned long long>(g_seed));
  std::abort();
}

uint64_t below(Random& random, uint64_t bound) { return random() % bound; }
bool one_in(Random& random, uint64_t n) { return below(random, n) == 0; }

// ---- Memory with guards ----

constexpr uint8_t kGuard = 0xd7;
constexpr uint64_t kGuardBytes = 32 << 10, kRegionBytes = 48 << 10;

// [guard][read and write][guard][read only][guard]; regions hold bytes below 0x80.
struct Arena {
  Arena() : bytes(3 * kGuardBytes + 2 * kRegionBytes, kGuard) {
    for (uint64_t i = 0; i < kRegionBytes; ++i) writable()[i] = read_only()[i] = pattern(i);
  }
  static uint8_t pattern(uint64_t i) { return static_cast<uint8_t>((i * 7 + i / 256) & 0x7f); }
  uint8_t* writable() { return bytes.data() + kGuardBytes; }
  uint8_t* read_only() { return bytes.data() + 2 * kGuardBytes + kRegionBytes; }
  bool sound() {
    const auto guard = [&](uint64_t at) {
      return std::all_of(bytes.data() + at, bytes.data() + at + kGuardBytes, [](uint8_t b) { return b == kGuard; });
    };
    bool same = true;
    for (uint64_t i = 0; i < kRegionBytes; ++i) same &= read_only()[i] == pattern(i);
    return same && guard(0) && guard(kGuardBytes + kRegionBytes) && guard(2 * (kGuardBytes + kRegionBytes));
  }
  Bytes bytes;
};

// A view with up to `most` bytes that fits into `size`.
View random_view(Random& random, uint64_t size, uint64_t most) {
  mr_view raw{};
  raw.run = 1 + below(random, one_in(random, 2) ? 8 : 2000);
  raw.ndim = static_cast<uint32_t>(below(random, 4));
  uint64_t extent = raw.run, bytes = raw.run;
  for (uint32_t i = raw.ndim; i-- > 0;) {
    raw.count[i] = 1 + below(random, 6);
    raw.stride[i] = extent + below(random, 20);
    extent = (raw.count[i] - 1) * raw.stride[i] + extent;
    bytes *= raw.count[i];
    if (extent > size || bytes > most)
      return View::contiguous(below(random, size / 2), below(random, std::min(most, size / 2)));
  }
  raw.offset = below(random, size - extent + 1);
  return View::from(raw);
}

// ---- Mutations ----

Bytes mutate(Random& random, Bytes stream) {
  for (uint64_t n = 1 + below(random, 4); n > 0 && !stream.empty(); --n) {
    const size_t at = below(random, stream.size());
    const size_t length = std::min<size_t>(1 + below(random, 100), stream.size() - at);
    const auto from = stream.begin() + static_cast<ptrdiff_t>(at);
    switch (below(random, 6)) {
      case 0:
        stream[at] ^= static_cast<uint8_t>(1u << below(random, 8));
        break;
      case 1:
        stream[at] = static_cast<uint8_t>(random());
        break;
      case 2: {
        const uint64_t values[] = {0,          1,       ~0ull, 1ull << 63, tcp::kPartBytes + 1, tcp::kChunkBytes + 1,
                                   0xffffffff, random()};
        const uint64_t value = values[below(random, 8)];
        const size_t width = one_in(random, 2) ? 8 : 4;
        if (stream.size() >= width) std::memcpy(stream.data() + std::min(at, stream.size() - width), &value, width);
        break;
      }
      case 3:
        stream.resize(at);
        break;
      case 4:
        stream.erase(from, from + static_cast<ptrdiff_t>(length));
        break;
      default: {
        const Bytes slice(from, from + static_cast<ptrdiff_t>(length));
        stream.insert(stream.begin() + static_cast<ptrdiff_t>(below(random, stream.size())), slice.begin(),
                      slice.end());
      }
    }
  }
  return stream;
}

// ---- The other end ----

// Waits for events; a minute without any is a hang.
void wait_for(int fd, short events) {
  pollfd polled{fd, events, 0};
  demand(::poll(&polled, 1, 60000) == 1, "hangs");
}

// Sends it all in pieces, ends our direction if told to, and takes what comes until the other side has closed.
Bytes converse(Random& random, int fd, const Bytes& said, bool end) {
  Bytes heard;
  size_t sent = 0;
  bool sending = true;
  while (true) {
    if (sending && sent == said.size()) {
      sending = false;
      if (end) ::shutdown(fd, SHUT_WR);
    }
    wait_for(fd, static_cast<short>(POLLIN | (sending ? POLLOUT : 0)));
    if (sending) {
      const size_t piece = std::min<size_t>(1 + below(random, one_in(random, 3) ? 30 : 30000), said.size() - sent);
      const ssize_t put = ::send(fd, said.data() + sent, piece, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (put > 0) sent += static_cast<size_t>(put);
      if (put < 0 && errno != EAGAIN) sending = false;
    }
    uint8_t buffer[16384];
    const ssize_t got = ::recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got > 0) heard.insert(heard.end(), buffer, buffer + got);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return heard;
  }
}

std::pair<Fd, Fd> sockets() {
  int ends[2];
  demand(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "has no sockets");
  return {Fd(ends[0]), Fd(ends[1])};
}

class Host final : public TestHost {
 public:
  explicit Host(const HostPort& peer) : TestHost("fuzz", small_options()) {
    info_.name = "peer";
    info_.tcp = {peer};
    on_loop([&] {
      link_ = make_tcp(*this);
      door_ = make_data_door(loop_, options_, [this](uint64_t session) {
        return session == session_ ? DataDoor::Session{link_, key_} : DataDoor::Session{};
      });
    });
  }
  ~Host() {
    on_loop([&] {
      door_->close_on_loop();
      link_->close_on_loop(fail(MR_PEER_LOST, "the end"));
    });
    loop_.stop();
  }

  tcp::TcpLink& link() { return static_cast<tcp::TcpLink&>(*link_); }
  DataDoor& door() { return *door_; }
  uint64_t malformed() { return counter("tcp_malformed"); }
  int ends_of(const OpRef& op) {
    std::lock_guard guard(lock_);
    return ends_of_[op.get()];
  }
  void forget_ends() {
    std::lock_guard guard(lock_);
    ends_of_.clear();
  }

  void send_on_loop(uint16_t, Bytes, const Fd*) override {}
  void request_on_loop(uint16_t, Bytes, std::function<void(Reply)> on_reply) override {
    loop_.post([on_reply = std::move(on_reply)] { on_reply({}); });  // every fence stands at once
  }
  void on_done(const OpRef& op, Status status) override {
    {
      std::lock_guard guard(lock_);
      ++ends_of_[op.get()];
    }
    TestHost::on_done(op, std::move(status));
  }

 private:
  static mr_options small_options() {
    mr_options raw = Options::defaults();
    raw.tcp_sockets = 1;
    return raw;
  }

  std::shared_ptr<Link> link_;
  std::unique_ptr<DataDoor> door_;
  std::mutex lock_;
  std::map<const Op*, int> ends_of_;
};

void put(Bytes& out, const void* data, size_t length) {
  const auto* const p = static_cast<const uint8_t*>(data);
  out.insert(out.end(), p, p + length);
}

// ---- The server ----

class ServerFuzz {
 public:
  explicit ServerFuzz(Host& host) : host_(host) {
    const RegionRef both = host.regions().create(arena_.writable(), kRegionBytes, MR_READ | MR_WRITE);
    const RegionRef read_only = host.regions().create(arena_.read_only(), kRegionBytes, MR_READ);
    names_[0] = {both->id, both->key};
    names_[1] = {read_only->id, read_only->key};
  }

  void round(Random& random) {
    size_t answer_bytes = 0;
    const Bytes valid = requests(random, &answer_bytes);
    const bool honest = one_in(random, 8);
    const uint64_t malformed = host_.malformed();
    auto [near, far] = sockets();
    host_.on_loop([&, socket = &near] { host_.link().server().adopt(1, ++number_, Stream(std::move(*socket))); });
    // An honest end closes after the answers have come; else it would lose some.
    Bytes heard;
    if (honest) {
      heard = take(random, far.get(), valid, answer_bytes);
      demand(host_.malformed() == malformed, "refused an honest stream");
      ++honest_;
    } else {
      heard = converse(random, far.get(), mutate(random, valid), true);
      refused_ += host_.malformed() - malformed;
    }
    const Bytes secret(16, kGuard);
    demand(std::search(heard.begin(), heard.end(), secret.begin(), secret.end()) == heard.end(),
           "leaked bytes from outside the region");
    demand(arena_.sound(), "wrote outside the region");
    ++rounds_;
  }
  void report() const {
    std::printf("server: %llu streams, %llu honest, %llu refused\n", rounds_, honest_, refused_);
    demand(rounds_ < 50 || (honest_ > 0 && refused_ > 0), "is blind: no stream was accepted, or none refused");
  }

 private:
  // Some requests, and how many bytes an honest server answers.
  Bytes requests(Random& random, size_t* answer_bytes) {
    Bytes out;
    for (uint64_t n = 1 + below(random, 8); n > 0; --n) {
      const uint32_t id = next_id_++;
      if (one_in(random, 6)) {
        uint8_t head[tcp::kMaxRequestBytes];
        put(out, head,
            tcp::encode_request(tcp::RequestKind::cancel, id - 10, {}, {}, 0, 0, head));  // of one that is over
        continue;
      }
      const bool write = one_in(random, 2);
      const View view = random_view(random, kRegionBytes, 20000);
      const uint64_t begin = below(random, view.bytes() + 1), length = below(random, view.bytes() - begin + 1);
      uint8_t head[tcp::kMaxRequestBytes];
      put(out, head,
          tcp::encode_request(write ? tcp::RequestKind::write : tcp::RequestKind::read, id,
                              names_[write ? 0 : below(random, 2)], view, begin, length, head));
      *answer_bytes += sizeof(tcp::Chunk);
      if (write)
        put_data(random, out, id, length);
      else if (length > 0)
        *answer_bytes += sizeof(tcp::Chunk) + length;
    }
    return out;
  }

  static void put_data(Random& random, Bytes& out, uint32_t id, uint64_t length) {
    tcp::Chunk chunk;
    chunk.id = id;
    while (length > 0) {
      chunk.length = static_cast<uint32_t>(1 + below(random, length));
      put(out, &chunk, sizeof chunk);
      for (uint32_t i = 0; i < chunk.length; ++i) out.push_back(static_cast<uint8_t>(random() & 0x7f));
      length -= chunk.length;
    }
    chunk.length = 0;
    chunk.last = 1;
    put(out, &chunk, sizeof chunk);
  }

  // Says it and waits for so many bytes.
  static Bytes take(Random& random, int fd, const Bytes& said, size_t length) {
    Bytes heard;
    for (size_t sent = 0; sent < said.size() || heard.size() < length;) {
      wait_for(fd, static_cast<short>(POLLIN | (sent < said.size() ? POLLOUT : 0)));
      const size_t piece = std::min<size_t>(1 + below(random, 5000), said.size() - sent);
      const ssize_t put = ::send(fd, said.data() + sent, piece, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (put > 0) sent += static_cast<size_t>(put);
      uint8_t buffer[16384];
      const ssize_t got = ::recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
      if (got > 0) heard.insert(heard.end(), buffer, buffer + got);
      demand(got > 0 || (got < 0 && errno == EAGAIN), "closed an honest socket");
    }
    demand(heard.size() == length, "answered more than it was asked");
    return heard;
  }

  Host& host_;
  Arena arena_;
  RegionName names_[2];
  uint32_t next_id_ = 100;
  uint64_t number_ = 0;
  unsigned long long rounds_ = 0, honest_ = 0, refused_ = 0;
};

// ---- The door ----

class DoorFuzz {
 public:
  explicit DoorFuzz(Host& host) : host_(host) {}

  void round(Random& random) {
    tcp::Hello hello;
    hello.session = host_.session_id();
    hello.number = 1ull << 32 | number_++;
    random_bytes(hello.nonce, sizeof hello.nonce);
    hello.proof = tcp::client_proof(host_.session_key(), hello, Digest{});
    Bytes valid;
    put(valid, &hello, sizeof hello);
    Bytes said = one_in(random, 8) ? valid : mutate(random, valid);
    if (one_in(random, 8)) said[0] = 22;  // on the way of TLS
    const bool honest = said.size() >= valid.size() && std::equal(valid.begin(), valid.end(), said.begin());
    auto [near, far] = sockets();
    host_.on_loop([&, socket = &near] { host_.door().accept_on_loop(std::move(*socket)); });
    const Bytes heard = converse(random, far.get(), said, true);
    if (honest) demand(heard.size() == sizeof(tcp::Welcome), "did not welcome a member");
    if (!honest) demand(heard.size() < sizeof(tcp::Welcome), "welcomed a stranger");
    (honest ? welcomed_ : refused_) += 1;
  }
  void report() const {
    std::printf("door: %llu welcomed, %llu refused\n", welcomed_, refused_);
    demand(welcomed_ + refused_ < 50 || (welcomed_ > 0 && refused_ > 0), "is blind at the door");
  }

 private:
  Host& host_;
  uint64_t number_ = 0;
  unsigned long long welcomed_ = 0, refused_ = 0;
};

// ---- The client ----

class ClientFuzz {
 public:
  ClientFuzz(Host& host, Fd listener) : host_(host), listener_(std::move(listener)) {}

  void round(Random& random) {
    Arena arena;
    std::vector<OpRef> ops;
    for (uint64_t n = 1 + below(random, 6); n > 0; --n) ops.push_back(start(random, arena));
    const bool honest = one_in(random, 8);
    const OpRef stopped = !honest && one_in(random, 4) ? ops[below(random, ops.size())] : nullptr;
    // The first connections are answered with noise, the last one honestly: the end must come either way.
    uint64_t lies = honest ? 0 : 1 + below(random, 2);
    while (!all_done(ops)) {
      if (!socket_.valid() && !greet(ops)) continue;
      serve(random, ops, lies > 0, stopped);
      if (lies > 0) {
        socket_.reset();
        --lies;
      }
    }
    bool all_ok = true;
    for (const auto& op : ops) {
      demand(host_.ends_of(op) == 1, "ended an operation twice, or never");
      all_ok &= op->status().ok();
      protocol_errors_ += op->status().kind == MR_PROTOCOL;
    }
    if (honest) demand(all_ok, "failed an operation that was answered honestly");
    demand(arena.sound(), "wrote outside the local view");
    const Bytes before = arena.bytes;
    if (one_in(random, 4)) socket_.reset();
    host_.on_loop([] {});
    demand(arena.bytes == before, "wrote to local memory after the end");
    host_.forget_ends();
    ++rounds_;
    honest_ += honest;
  }
  void report() const {
    std::printf("client: %llu rounds, %llu honest, %llu protocol errors\n", rounds_, honest_, protocol_errors_);
    demand(rounds_ < 50 || (honest_ > 0 && protocol_errors_ > 0), "is blind as a client");
  }

 private:
  OpRef start(Random& random, Arena& arena) {
    auto op = std::make_shared<Op>();
    op->verb = one_in(random, 3) ? Verb::write : Verb::read;
    auto remote = std::make_shared<RemoteRegion>();
    remote->owner = "peer";
    remote->name.id = 5;
    remote->size = kRegionBytes;
    op->remote = remote;
    op->local = arena.writable();
    op->local_view = random_view(random, kRegionBytes, 20000);
    op->remote_view = View::contiguous(0, op->local_view.bytes());
    op->submitted = Clock::now();
    host_.loop().run([this, op] { host_.link().start_on_loop(op); });
    return op;
  }

  static bool all_done(const std::vector<OpRef>& ops) {
    return std::all_of(ops.begin(), ops.end(), [](const OpRef& op) { return op->done(); });
  }

  // Waits for input on fd, but no longer than the operations last.
  static bool ready(int fd, const std::vector<OpRef>& ops) {
    const Time give_up = after(60);
    pollfd polled{fd, POLLIN, 0};
    while (::poll(&polled, 1, 1) == 0) {
      if (all_done(ops)) return false;
      demand(Clock::now() < give_up, "hangs as a client");
    }
    return true;
  }

  bool read_all(void* out, size_t length, const std::vector<OpRef>& ops) {
    auto* p = static_cast<uint8_t*>(out);
    while (length > 0) {
      if (!ready(socket_.get(), ops)) return false;
      const ssize_t got = ::recv(socket_.get(), p, length, 0);
      if (got <= 0) return false;
      p += got;
      length -= static_cast<size_t>(got);
    }
    return true;
  }

  bool greet(const std::vector<OpRef>& ops) {
    if (!ready(listener_.get(), ops)) return false;
    socket_ = Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    tcp::Hello hello;
    tcp::Welcome welcome;
    if (!socket_.valid() || !read_all(&hello, sizeof hello, ops)) return socket_.reset(), false;
    welcome.proof = tcp::server_proof(host_.session_key(), hello, welcome, Digest{});
    return ::send(socket_.get(), &welcome, sizeof welcome, MSG_NOSIGNAL) == sizeof welcome;
  }

  // Answers requests until the operations have ended or, if it lies, some of them.
  void serve(Random& random, const std::vector<OpRef>& ops, bool lie, const OpRef& stopped) {
    Bytes answers;
    // Each operation that has not ended asks once: of more requests than that, none would come.
    const auto open =
        static_cast<uint64_t>(std::count_if(ops.begin(), ops.end(), [](const OpRef& op) { return !op->done(); }));
    if (open == 0) return;
    for (uint64_t n = lie ? 1 + below(random, open) : ~0ull; n > 0; --n) {
      tcp::Request request;
      if (!read_all(&request, sizeof request, ops)) break;
      Bytes rest(request.ndim * sizeof(tcp::Dimension));
      if (!read_all(rest.data(), rest.size(), ops)) break;
      Bytes answer = answer_to(random, request, ops, lie);
      if (!lie && !send_all(answer)) break;
      answers.insert(answers.end(), answer.begin(), answer.end());
    }
    if (!lie) return;
    send_all(mutate(random, std::move(answers)));
    if (stopped && !stopped->done()) {
      stopped->stop_kind = MR_CANCELLED;
      host_.on_loop([&] {
        if (!stopped->done()) host_.link().stop_on_loop(stopped);
      });
    }
  }

  bool send_all(const Bytes& data) {
    return ::send(socket_.get(), data.data(), data.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(data.size());
  }

  Bytes answer_to(Random& random, const tcp::Request& request, const std::vector<OpRef>& ops, bool lie) {
    Bytes out;
    tcp::Chunk chunk;
    chunk.id = request.id;
    if (request.kind == tcp::RequestKind::cancel) return out;
    if (request.kind == tcp::RequestKind::write) {
      do {
        Bytes data;
        if (!read_all(&chunk, sizeof chunk, ops)) return out;
        data.resize(chunk.length);
        if (!read_all(data.data(), data.size(), ops)) return out;
      } while (chunk.last == 0);
      chunk = {};
      chunk.id = request.id;
    } else {
      for (uint64_t left = request.length; left > 0; left -= chunk.length) {
        chunk.length = static_cast<uint32_t>(1 + below(random, left));
        put(out, &chunk, sizeof chunk);
        out.insert(out.end(), chunk.length, 0x33);
      }
    }
    static const char text[] = "no";
    const bool refuse = lie && one_in(random, 3);
    chunk.length = refuse ? 2 : 0;
    chunk.kind = refuse ? MR_ACCESS_DENIED : MR_OK;
    chunk.last = 1;
    put(out, &chunk, sizeof chunk);
    if (refuse) put(out, text, 2);
    return out;
  }

  Host& host_;
  Fd listener_, socket_;
  unsigned long long rounds_ = 0, honest_ = 0, protocol_errors_ = 0;
};

int fuzz(double seconds, uint64_t seed) {
  HostPort at;
  Fd listener = tcp_listen({"127.0.0.1", 0}, 0, 4, &at);
  Host host(at);
  ServerFuzz server(host);
  DoorFuzz door(host);
  ClientFuzz client(host, std::move(listener));
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  g_limited = true;
  for (const Time end = after(seconds); Clock::now() < end; ++seed) {
    Random random(g_seed = seed);
    server.round(random);
    door.round(random);
    client.round(random);
  }
  g_limited = false;
  server.report();
  door.report();
  client.report();
  return 0;
}

}  // namespace
}  // namespace mr

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : mr::random_u64() >> 16;
  try {
    return mr::fuzz(seconds, seed);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_tcp: %s (seed %llu)\n", error.what(), static_cast<unsigned long long>(mr::g_seed));
    return 1;
  }
}
