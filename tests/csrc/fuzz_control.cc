// Mutated streams against the frame parser and the hello, before and after the proof. Bounded by time: fuzz_control
// SECONDS [SEED].
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <future>
#include <random>

#include "transport/control.h"
#include "transport/options.h"

using namespace mr;

namespace {

// Ends of one connection; the far end is written by the fuzzer.
struct Sink : ControlStream::Handler {
  void on_up(ControlStream&) override { ++ups; }
  void on_frame(ControlStream&, Frame& frame) override {
    ++frames;
    // What handlers do with a frame: parse it, and refuse what is malformed.
    Reader in(frame.payload);
    decode_info(in);
    View::decode(in);
    RemoteRegion::decode(in.rest());
  }
  void on_closed(ControlStream&, const Status&) override { closed.set_value(); }

  int ups = 0, frames = 0;
  std::promise<void> closed;
};

struct Party {
  Options options = Options::from(Options::defaults());
  PeerInfo self;
  Loop loop{"fuzz"};
};

// What an honest initiator says, up to and with `frames` frames after the hello.
Bytes record(Party& party, const Secret& secret) {
  party.options.secret = secret;
  int near[2], far[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, near) != 0) std::abort();
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, far) != 0) std::abort();
  Sink client_sink, server_sink;
  std::shared_ptr<ControlStream> client, server;
  std::promise<void> ready;
  party.loop.run([&] {
    client =
        std::make_shared<ControlStream>(party.loop, party.options, party.self, Stream(Fd(near[0])), true, &client_sink);
    server =
        std::make_shared<ControlStream>(party.loop, party.options, party.self, Stream(Fd(far[1])), false, &server_sink);
    client->start_on_loop();
    server->start_on_loop();
    ready.set_value();
  });
  ready.get_future().wait();
  Bytes said;
  Fd a(near[1]), b(far[0]);
  uint8_t buffer[65536];
  for (int quiet = 0; quiet < 200 && server_sink.ups == 0; ++quiet) {
    party.loop.barrier();
    if (const ssize_t n = ::recv(a.get(), buffer, sizeof buffer, 0); n > 0) {
      said.insert(said.end(), buffer, buffer + n);
      (void)!::send(b.get(), buffer, static_cast<size_t>(n), MSG_NOSIGNAL);
    }
    if (const ssize_t n = ::recv(b.get(), buffer, sizeof buffer, 0); n > 0)
      (void)!::send(a.get(), buffer, static_cast<size_t>(n), MSG_NOSIGNAL);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  std::promise<void> done;
  party.loop.run([&] {
    client->close_on_loop({}, false);
    server->close_on_loop({}, false);
    done.set_value();
  });
  done.get_future().wait();
  party.loop.barrier();
  return said;
}

Bytes mutate(const Bytes& seed, std::mt19937_64& random) {
  Bytes out = seed;
  for (int n = 1 + static_cast<int>(random() % 6); n > 0; --n) {
    const size_t at = out.empty() ? 0 : random() % out.size();
    switch (random() % 6) {
      case 0:
        if (!out.empty()) out[at] = static_cast<uint8_t>(random());
        break;
      case 1:
        if (!out.empty()) out[at] ^= static_cast<uint8_t>(1u << (random() % 8));
        break;
      case 2:
        out.resize(at);
        break;
      case 3:
        out.insert(out.begin() + static_cast<std::ptrdiff_t>(at), random() % 32, static_cast<uint8_t>(random()));
        break;
      case 4:
        for (size_t i = at; i < std::min(at + 4, out.size()); ++i) out[i] = 0xff;
        break;
      case 5:
        out.insert(out.end(), seed.begin(), seed.end());
        break;
    }
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5;
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  Party party;
  party.options.raw.connect_timeout = 5;
  const Secret secret = Secret::random();
  const Bytes honest = record(party, secret);
  if (honest.size() < 100) return std::fprintf(stderr, "fuzz_control: no hello to mutate\n"), 1;
  uint64_t rounds = 0, up = 0;
  for (const Time end = after(seconds); Clock::now() < end; ++rounds) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) return 1;
    Sink sink;
    const bool initiator = random() % 4 == 0;
    std::shared_ptr<ControlStream> stream;
    party.loop.run([&] {
      stream =
          std::make_shared<ControlStream>(party.loop, party.options, party.self, Stream(Fd(pair[0])), initiator, &sink);
      stream->start_on_loop();
    });
    {
      Fd far(pair[1]);
      const Bytes data = mutate(honest, random);
      for (size_t at = 0; at < data.size();) {
        const size_t length = std::min<size_t>(data.size() - at, 1 + random() % data.size());
        if (::send(far.get(), data.data() + at, length, MSG_NOSIGNAL) < 0) break;
        at += length;
      }
    }  // closed: every stream ends, whatever it was told
    if (sink.closed.get_future().wait_for(std::chrono::seconds(10)) != std::future_status::ready)
      return std::fprintf(stderr, "fuzz_control: a stream did not end (round %lu)\n", rounds), 1;
    party.loop.barrier();
    up += static_cast<uint64_t>(sink.ups);
  }
  // Nobody without the secret gets in: the proof is over a fresh nonce.
  if (up != 0) return std::fprintf(stderr, "fuzz_control: %lu mutated hellos were accepted\n", up), 1;
  std::printf("fuzz_control: %lu streams, none accepted\n", rounds);
  return 0;
}
