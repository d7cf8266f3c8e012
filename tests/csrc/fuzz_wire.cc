// Mutated bytes against every parser that needs nothing but bytes. Whatever comes in, the answer is a value that
// survives being written and read again, or a typed error. Bounded by time: fuzz_wire SECONDS [SEED].
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "memory/region.h"
#include "memory/view.h"
#include "transport/address.h"
#include "transport/control.h"
#include "transport/tcp_wire.h"

using namespace mr;

namespace {

using Random = std::mt19937_64;

uint64_t below(Random& random, uint64_t bound) { return random() % bound; }

// Small, huge, and around the edges where sums and products overflow.
uint64_t interesting(Random& random) {
  switch (below(random, 5)) {
    case 0:
      return below(random, 10);
    case 1:
      return UINT64_MAX - below(random, 10);
    case 2:
      return (1ull << below(random, 64)) - below(random, 2);
    case 3:
      return below(random, 1 << 20);
    default:
      return random();
  }
}

std::string random_text(Random& random) {
  static const std::string alphabet = "abc019.:-_/%[]?&= \xff";
  std::string out;
  for (uint64_t n = below(random, 12); n > 0; --n) out += alphabet[below(random, alphabet.size())];
  return out;
}

Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

View random_view(Random& random) {
  mr_view raw{};
  raw.offset = below(random, 1000);
  raw.run = below(random, 100);
  raw.ndim = static_cast<uint32_t>(below(random, MR_MAX_DIMS + 1));
  for (uint32_t i = 0; i < raw.ndim; ++i) raw.count[i] = 1 + below(random, 3), raw.stride[i] = below(random, 1000);
  return View::from(raw);
}

Bytes encode(const View& view) {
  Writer out;
  view.encode(out);
  return out.take();
}

// An accepted view never leads outside its own end.
void check_walk(const View& view) {
  Cursor cursor(view);
  for (int i = 0; i < 100 && cursor.left() > 0; ++i) {
    const auto run = cursor.next(1 + view.bytes() / 7);
    if (run.length == 0 || run.offset > view.end() || run.length > view.end() - run.offset) std::abort();
  }
  cursor.seek(view.bytes() / 2);
  const auto run = cursor.peek(UINT64_MAX);
  if (run.offset > view.end() && run.length > 0) std::abort();
}

// Each parser: bytes that it accepts, and reading them (what was read, written again).
struct Parser {
  const char* name;
  Bytes (*make)(Random&);
  Bytes (*read)(const Bytes&);
  uint64_t accepted = 0, refused = 0;
};

Bytes make_region(Random& random) {
  RemoteRegion region;
  region.owner = random_text(random);
  region.address = random_text(random);
  region.incarnation = random();
  region.name = {random(), Key::random()};
  region.size = interesting(random) / 4;
  region.base = interesting(random) / 4;
  region.access = static_cast<uint32_t>(below(random, 4));
  region.slot = static_cast<uint32_t>(below(random, kBoardSlots));
  region.shared_id = random();
  region.shared_offset = interesting(random) / 4;
  return region.encode();
}

Bytes make_info(Random& random) {
  PeerInfo info;
  info.name = random_text(random);
  info.incarnation = random();
  info.boot_id = random_text(random);
  info.address = random_text(random);
  info.lanes = random_text(random);
  for (uint64_t n = below(random, 4); n > 0; --n)
    info.tcp.push_back({random_text(random), static_cast<uint16_t>(random())});
  Writer out;
  encode_info(info, out);
  return out.take();
}

Bytes read_info(const Bytes& bytes) {
  Reader in(bytes);
  const PeerInfo info = decode_info(in);
  in.end();
  Writer out;
  encode_info(info, out);
  return out.take();
}

Bytes make_address(Random& random) {
  Address address;
  address.tcp = {below(random, 2) == 0 ? "10.0.0.5" : "fe80::1", static_cast<uint16_t>(1 + below(random, 65535))};
  address.name = random_text(random);
  address.incarnation = random() | 1;
  address.boot_id = random_text(random);
  address.unix_name = random_text(random);
  return bytes_of(address.text());
}

Bytes read_address(const Bytes& bytes) {
  const Address address = Address::parse(text_of(bytes));
  return bytes_of(address.incarnation == 0 ? address.tcp.text() : address.text());
}

Bytes make_request(Random& random) {
  const View view = random_view(random);
  const uint64_t begin = below(random, view.bytes() + 1);
  const uint64_t length = std::min(tcp::kPartBytes, below(random, view.bytes() - begin + 1));
  Bytes out(tcp::kMaxRequestBytes);
  const auto kind = below(random, 2) == 0 ? tcp::RequestKind::read : tcp::RequestKind::write;
  const RegionName region{random(), Key::random()};
  out.resize(tcp::encode_request(kind, static_cast<uint32_t>(random()), region, view, begin, length, out.data()));
  return out;
}

// As the server does it: the number of dimensions says how many bytes a request has.
Bytes read_request(const Bytes& bytes) {
  if (bytes.size() < sizeof(tcp::Request)) throw Error(MR_PROTOCOL, "short");
  const uint8_t ndim = bytes[offsetof(tcp::Request, ndim)];
  if (ndim > MR_MAX_DIMS || bytes.size() != sizeof(tcp::Request) + ndim * sizeof(tcp::Dimension))
    throw Error(MR_PROTOCOL, "no request has this length");
  tcp::Request request;
  const View view = tcp::decode_request(bytes.data(), &request);
  if (request.kind == tcp::RequestKind::cancel) return bytes;
  check_walk(view);
  if (request.begin > view.bytes() || request.length > view.bytes() - request.begin) std::abort();
  Bytes out(tcp::kMaxRequestBytes);
  const RegionName region{request.region, {{request.key[0], request.key[1]}}};
  out.resize(tcp::encode_request(request.kind, request.id, region, view, request.begin, request.length, out.data()));
  return out;
}

std::array parsers{
    Parser{"View", [](Random& random) { return encode(random_view(random)); },
           [](const Bytes& bytes) {
             Reader in(bytes);
             const View view = View::decode(in);
             in.end();
             check_walk(view);
             return encode(view);
           }},
    Parser{"RemoteRegion", make_region, [](const Bytes& bytes) { return RemoteRegion::decode(bytes).encode(); }},
    Parser{"PeerInfo", make_info, read_info},
    Parser{"Address", make_address, read_address},
    Parser{"HostPort", [](Random& random) { return bytes_of("node-" + std::to_string(below(random, 99)) + ":80"); },
           [](const Bytes& bytes) { return bytes_of(HostPort::parse(text_of(bytes)).text()); }},
    Parser{"tcp request", make_request, read_request},
};

void mutate(Bytes& bytes, Random& random) {
  for (uint64_t n = below(random, 4); n > 0; --n) {
    const size_t at = bytes.empty() ? 0 : below(random, bytes.size());
    const auto here = bytes.begin() + static_cast<ptrdiff_t>(at);
    switch (below(random, 6)) {
      case 0:
        if (!bytes.empty()) bytes[at] ^= static_cast<uint8_t>(1u << below(random, 8));
        break;
      case 1:
        bytes.resize(at);
        break;
      case 2:
        bytes.insert(here, static_cast<uint8_t>(random()));
        break;
      case 3:
        if (!bytes.empty()) bytes.erase(here, here + static_cast<ptrdiff_t>(1 + below(random, bytes.size() - at)));
        break;
      case 4: {  // a number where one may be
        const uint64_t value = interesting(random);
        const size_t width = std::min<size_t>(1u << below(random, 4), bytes.size() - at);
        if (width > 0) std::memcpy(bytes.data() + at, &value, width);
        break;
      }
      default: {
        const Bytes tail(here, bytes.end());
        bytes.insert(bytes.end(), tail.begin(), tail.end());
      }
    }
  }
}

// False with a word on stderr where the promise does not hold.
bool try_one(Parser& parser, const Bytes& bytes, bool must_pass) {
  Bytes once;
  try {
    once = parser.read(bytes);
  } catch (const Error& error) {
    ++parser.refused;
    const int kind = error.status().kind;
    const bool expected = kind == MR_PROTOCOL || kind == MR_CONFIG || kind == MR_OUT_OF_BOUNDS;
    if (!must_pass && expected && !error.status().text.empty()) return true;
    std::fprintf(stderr, "fuzz_wire: %s: %s (kind %d)\n", parser.name, error.what(), kind);
    return false;
  }
  ++parser.accepted;
  // Straight from its own writer the bytes are the very same; else written and read again they are.
  if (must_pass ? once == bytes : parser.read(once) == once) return true;
  std::fprintf(stderr, "fuzz_wire: %s: what was read is written differently\n", parser.name);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 0) : random_u64();
  std::printf("fuzz_wire: seed %lu\n", static_cast<unsigned long>(seed));
  std::fflush(stdout);
  Random random(seed);
  uint64_t rounds = 0;
  for (const Time end = after(seconds); Clock::now() < end; ++rounds)
    for (Parser& parser : parsers) {
      Bytes bytes = parser.make(random);
      if (!try_one(parser, bytes, true)) return 1;
      for (int i = 0; i < 20; ++i) {
        Bytes mutated = bytes;
        mutate(mutated, random);
        if (!try_one(parser, mutated, false)) return 1;
      }
    }
  bool reached = true;
  for (const Parser& parser : parsers) {
    std::printf("fuzz_wire: %-12s %lu accepted, %lu refused\n", parser.name,
                static_cast<unsigned long>(parser.accepted), static_cast<unsigned long>(parser.refused));
    reached &= parser.accepted > 0 && parser.refused > 0;
  }
  return reached ? 0 : 1;
}
