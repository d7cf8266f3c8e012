#include <algorithm>

#include "check.h"
#include "tcp_side.h"
#include "transport/address.h"
#include "transport/tcp_wire.h"
#include "view_copy.h"

using namespace mr;
using mr::test::Proxy;
using mr::test::TcpPair;
using mr::test::TcpSide;

namespace {

constexpr uint64_t kMiB = 1u << 20;

Bytes noise(uint64_t length, uint64_t seed = 1) {
  Bytes out(length);
  uint64_t word = seed + 0x9e3779b97f4a7c15;
  for (uint64_t i = 0; i < length; i += 8) {
    word ^= word << 13;
    word ^= word >> 7;
    word ^= word << 17;
    std::memcpy(out.data() + i, &word, std::min<uint64_t>(8, length - i));
  }
  return out;
}

View view_of(uint64_t offset, uint64_t run, std::vector<std::pair<uint64_t, uint64_t>> dims) {
  mr_view raw{};
  raw.offset = offset;
  raw.run = run;
  raw.ndim = static_cast<uint32_t>(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    raw.count[i] = dims[i].first;
    raw.stride[i] = dims[i].second;
  }
  return View::from(raw);
}

mr_options with_tls() {
  static const Bytes secret(32, 7);
  mr_options options = Options::defaults();
  options.bulk_tls = 1;
  options.secret = secret.data();
  options.secret_len = secret.size();
  return options;
}

mr_options with_sockets(uint32_t count) {
  mr_options options = Options::defaults();
  options.tcp_sockets = count;
  return options;
}

void check_sizes(TcpPair& pair, uint64_t largest = 9 * kMiB + 1) {
  for (const uint64_t size : {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{4095}, uint64_t{4096}, uint64_t{4097},
                              kMiB - 1, kMiB, kMiB + 1, largest}) {
    const Bytes there = noise(size + 3, size);
    Bytes owned = there, here(size + 2, 0xee);
    const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
    const OpRef read = pair.user.read(region, 3, here.data() + 1, size);
    CHECK_EQ(TcpSide::wait(read), MR_OK);
    CHECK(std::equal(here.begin() + 1, here.begin() + 1 + static_cast<ptrdiff_t>(size), there.begin() + 3));
    CHECK_EQ(here.front(), 0xee);
    CHECK_EQ(here.back(), 0xee);
    CHECK_EQ(std::string(read->lane), "tcp");
    CHECK(read->chunks >= 1 && read->rails >= 1);

    const Bytes fresh = noise(size, size + 1);
    const OpRef write = pair.user.write(region, 2, fresh.data(), size);
    CHECK_EQ(TcpSide::wait(write), MR_OK);
    CHECK_EQ(write->remote_state, MR_WRITTEN);
    CHECK(std::equal(fresh.begin(), fresh.end(), owned.begin() + 2));
    CHECK_EQ(owned[0], there[0]);
    CHECK_EQ(owned[1], there[1]);
    CHECK_EQ(owned[size + 2], there[size + 2]);
    pair.owner.drop(region);
  }
}

}  // namespace

TEST(sizes_and_unaligned_ends) {
  TcpPair pair;
  check_sizes(pair.begin(), 64 * kMiB);
  CHECK(pair.user.counter("heard") > 0);
  CHECK(pair.owner.counter("heard") > 0);
}

TEST(sizes_over_tls) {
  TcpPair pair(with_tls());
  check_sizes(pair.begin());
}

TEST(sizes_over_one_socket) {
  TcpPair pair(with_sockets(1));
  check_sizes(pair.begin());
  CHECK_EQ(pair.proxy.connections(), 1u);
}

TEST(one_side_asks_for_tls_and_both_speak_it) {
  mr_options plain = with_tls();
  plain.bulk_tls = 0;
  for (const bool user_asks : {false, true}) {
    Bytes owned = noise(100000), here(100000);
    TcpPair pair(user_asks ? with_tls() : plain, user_asks ? plain : with_tls());
    pair.begin();
    const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
    CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_OK);
    CHECK(here == owned);
    const Bytes first = pair.proxy.recorded(1);
    CHECK(first == Bytes{22});  // a TLS handshake record
  }
}

// Where an operation ends early the owner may be sending from its memory until it is closed: that lives longer.
TEST(large_operations_use_more_sockets_small_ones_the_first) {
  Bytes owned = noise(64 * kMiB), here(64 * kMiB);
  TcpPair pair(with_sockets(3));
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), kMiB)), MR_OK);
  CHECK_EQ(pair.user.counter("tcp_sockets_opened"), 1u);
  for (const bool connects : {true, false}) {
    std::fill(here.begin(), here.end(), 0);
    const OpRef large = pair.user.read(region, 0, here.data(), here.size());
    CHECK_EQ(TcpSide::wait(large), MR_OK);
    CHECK(here == owned);
    CHECK_EQ(large->chunks.load(), 16u);
    CHECK(connects || large->rails >= 2);
    CHECK(pair.user.await_count("tcp_sockets_opened", 3));
  }
  CHECK_EQ(pair.user.counter("tcp_sockets_opened"), 3u);
}

TEST(over_loopback_one_socket_takes_all_that_is_large) {
  Bytes owned = noise(64 * kMiB), here(64 * kMiB);
  TcpPair pair(with_sockets(3));
  pair.user.look_only_at(pair.proxy.at(), boot_id());
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  for (int round = 0; round < 2; ++round) {
    std::fill(here.begin(), here.end(), 0);
    CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_OK);
    CHECK(here == owned);
    CHECK_EQ(TcpSide::wait(pair.user.write(region, 0, here.data(), here.size())), MR_OK);
    CHECK(here == owned);
  }
  CHECK(pair.user.counter("tcp_sockets_opened") <= 2);
}

TEST(strided_on_both_ends) {
  TcpPair pair;
  pair.begin();
  // Runs that are packed and runs that are not, in one, two and three dimensions, many of them and few.
  struct Case {
    View there, here;
  };
  const Case cases[] = {
      {view_of(5, 1024, {{256, 4096}}), View::contiguous(0, 256 * 1024)},
      {view_of(0, 4, {{1000, 12}}), view_of(1, 8, {{500, 9}})},
      {view_of(3, 300, {{7, 40000}, {11, 900}}), view_of(0, 77, {{300, 100}})},
      {View::contiguous(9, 3000000), view_of(2, 1000, {{3000, 1001}})},
      {view_of(0, 1, {{3, 500000}, {5, 90000}, {7, 11000}, {11, 800}, {13, 2}}),
       View::contiguous(4, 3 * 5 * 7 * 11 * 13)},
      {view_of(1, 12345, {{900, 12500}}), view_of(0, 12345, {{900, 12400}})},
      {view_of(0, 16, {{1000, 0}}), View::contiguous(0, 16000)},  // the same bytes again and again
  };
  for (const Case& c : cases) {
    CHECK_EQ(c.there.bytes(), c.here.bytes());
    Bytes owned = noise(c.there.end() + 10), here(c.here.end() + 10, 0x55), expected = here;
    const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
    const uint64_t answers = pair.user.counter("heard");
    test::copy_views(expected.data(), c.here, owned.data(), c.there, 0, c.here.bytes());
    const OpRef read = pair.user.start(Verb::read, region, c.there, here.data(), c.here);
    CHECK_EQ(TcpSide::wait(read), MR_OK);
    CHECK(here == expected);
    CHECK_EQ(read->chunks.load(), (c.here.bytes() + 4 * kMiB - 1) / (4 * kMiB));  // however many runs: one request
    CHECK(pair.user.counter("heard") > answers);
    if (c.there.raw().ndim > 0 && c.there.raw().stride[0] == 0) continue;  // no place to write to

    Bytes fresh = noise(here.size(), 2), wanted = owned;
    test::copy_views(wanted.data(), c.there, fresh.data(), c.here, 0, c.here.bytes());
    CHECK_EQ(TcpSide::wait(pair.user.start(Verb::write, region, c.there, fresh.data(), c.here)), MR_OK);
    CHECK(owned == wanted);
    pair.owner.drop(region);
  }
}

TEST(both_directions_at_once) {
  TcpPair pair;
  pair.begin();
  Bytes a = noise(48 * kMiB, 1), b = noise(48 * kMiB, 2), from_a(a.size()), from_b(b.size()), target_a(a.size()),
        target_b(b.size());
  const RemoteRegion region_a = pair.user.share(a.data(), a.size()), region_b = pair.owner.share(b.data(), b.size());
  const RemoteRegion into_a = pair.user.share(target_a.data(), a.size()),
                     into_b = pair.owner.share(target_b.data(), b.size());
  const OpRef ops[] = {pair.user.read(region_b, 0, from_b.data(), b.size()),
                       pair.owner.read(region_a, 0, from_a.data(), a.size()),
                       pair.user.write(into_b, 0, a.data(), a.size()), pair.owner.write(into_a, 0, b.data(), b.size())};
  for (const auto& op : ops) CHECK_EQ(TcpSide::wait(op), MR_OK);
  CHECK(from_a == a && from_b == b && target_a == b && target_b == a);
}

TEST(ten_thousand_small_operations_in_flight) {
  TcpPair pair;
  pair.begin();
  constexpr uint64_t kOps = 10000;
  Bytes owned = noise(kOps * 8), here(kOps * 8), source = noise(kOps * 8, 3), target(kOps * 8);
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size()),
                     into = pair.owner.share(target.data(), target.size());
  std::vector<OpRef> ops;
  for (uint64_t i = 0; i < kOps; ++i) {
    ops.push_back(pair.user.read(region, i * 8, here.data() + i * 8, 8));
    ops.push_back(pair.user.write(into, i * 8, source.data() + i * 8, 8));
  }
  for (const auto& op : ops) CHECK_EQ(TcpSide::wait(op), MR_OK);
  CHECK(here == owned);
  CHECK(target == source);
  CHECK_EQ(pair.user.ends(), 2 * kOps);
  CHECK_EQ(pair.user.doubled_ends(), 0u);
}

TEST(the_owner_refuses_what_was_not_granted) {
  Bytes owned(4096), here(4096), before = noise(4096);
  TcpPair pair;
  pair.begin();
  owned = before;
  const RemoteRegion read_only = pair.owner.share(owned.data(), owned.size(), MR_READ);
  const OpRef write = pair.user.write(read_only, 0, here.data(), 100);
  CHECK_EQ(TcpSide::wait(write), MR_ACCESS_DENIED);
  CHECK_EQ(write->remote_state, MR_NOT_WRITTEN);
  CHECK(write->status().text.find("does not grant write") != std::string::npos);
  CHECK_EQ(write->status().text,
           write->describe() + ": region " + std::to_string(read_only.name.id) + " does not grant write");
  CHECK(owned == before);

  RemoteRegion guessed = read_only;
  guessed.name.key.word[1] ^= 1;
  CHECK_EQ(TcpSide::wait(pair.user.read(guessed, 0, here.data(), 8)), MR_ACCESS_DENIED);
  CHECK_EQ(TcpSide::wait(pair.user.read(read_only, 4090, here.data(), 7)), MR_OUT_OF_BOUNDS);
  CHECK_EQ(TcpSide::wait(pair.user.read(read_only, ~0ull - 100, here.data(), 7)), MR_OUT_OF_BOUNDS);
  pair.owner.drop(read_only);
  CHECK_EQ(TcpSide::wait(pair.user.read(read_only, 0, here.data(), 0)), MR_ACCESS_DENIED);
  // A refusal costs no socket.
  CHECK_EQ(pair.user.counter("tcp_sockets_lost"), 0u);
  CHECK_EQ(pair.user.counter("tcp_sockets_opened"), 1u);
}

TEST(a_drop_in_the_middle_of_a_read_ends_it) {
  Bytes owned = noise(64 * kMiB), here(64 * kMiB);
  TcpPair pair(with_sockets(2));
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  pair.proxy.allow(Proxy::down, 3 * kMiB + 17);
  const OpRef op = pair.user.read(region, 0, here.data(), here.size());
  CHECK(pair.proxy.await_stall(Proxy::down));
  pair.owner.drop(region);
  // From here on the memory is the application's own again: what the lane still read of it would be a defect.
  const Bytes secret(owned.size(), 0xab);
  pair.owner.on_loop([&] { owned = secret; });
  pair.proxy.allow(Proxy::down, Proxy::kUnlimited);
  CHECK_EQ(TcpSide::wait(op), MR_ACCESS_DENIED);
  CHECK(op->status().text.find("was dropped") != std::string::npos);
  CHECK(std::search(here.begin(), here.end(), secret.begin(), secret.begin() + 64) == here.end());
  CHECK_EQ(pair.user.counter("tcp_sockets_lost"), 0u);
}

TEST(a_drop_in_the_middle_of_a_write_ends_it) {
  Bytes owned(64 * kMiB, 0), here = noise(64 * kMiB);
  TcpPair pair(with_sockets(2));
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  pair.proxy.allow(Proxy::up, 3 * kMiB + 17);
  const OpRef op = pair.user.write(region, 0, here.data(), here.size());
  CHECK(pair.proxy.await_stall(Proxy::up));
  for (bool written = false; !written;) {  // the allowance is on its way
    pair.owner.on_loop([&] { written = std::any_of(owned.begin(), owned.end(), [](uint8_t b) { return b != 0; }); });
    CHECK(!op->done());
  }
  pair.owner.drop(region);
  Bytes after_drop;
  pair.owner.on_loop([&] { after_drop = owned; });
  pair.proxy.allow(Proxy::up, Proxy::kUnlimited);
  CHECK_EQ(TcpSide::wait(op), MR_ACCESS_DENIED);
  CHECK_EQ(op->remote_state, MR_UNKNOWN);
  CHECK(owned == after_drop);
  CHECK_EQ(pair.user.counter("tcp_sockets_lost"), 0u);
}

TEST(a_cancelled_read_never_writes_its_destination_again) {
  for (const bool tls : {false, true}) {
    mr_options options = tls ? with_tls() : Options::defaults();
    options.tcp_sockets = 2;
    Bytes owned = noise(32 * kMiB), here(32 * kMiB), other(kMiB);
    TcpPair pair(options);
    pair.begin();
    const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
    pair.proxy.allow(Proxy::down, 3 * kMiB + 17);
    const OpRef op = pair.user.read(region, 0, here.data(), here.size());
    CHECK(pair.proxy.await_stall(Proxy::down));
    pair.user.stop(op, MR_CANCELLED);
    CHECK(op->done());
    CHECK_EQ(op->status().kind, MR_CANCELLED);
    const Bytes mark(here.size(), 0xcd);
    here = mark;
    pair.proxy.allow(Proxy::down, Proxy::kUnlimited);
    // The next one comes behind the rest of the old one, on the same sockets.
    Bytes again(owned.size());
    CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, again.data(), again.size())), MR_OK);
    CHECK(again == owned);
    CHECK(here == mark);
    CHECK_EQ(pair.user.counter("tcp_sockets_lost"), 0u);
    // Of 32 MiB only what was asked for already has been sent for nothing: less than a part for each of two sockets.
    CHECK(pair.owner.counter("tcp_bytes_served") < 2 * owned.size());
  }
}

TEST(a_cancelled_write_sends_nothing_false_and_nothing_late) {
  for (const bool tls : {false, true}) {
    mr_options options = tls ? with_tls() : Options::defaults();
    options.tcp_sockets = 2;
    Bytes owned(32 * kMiB, 0), here(32 * kMiB, 0x11);
    TcpPair pair(options);
    pair.begin();
    const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
    pair.proxy.allow(Proxy::up, 3 * kMiB + 17);
    const OpRef op = pair.user.write(region, 0, here.data(), here.size());
    CHECK(pair.proxy.await_stall(Proxy::up));
    pair.user.stop(op, MR_TRANSFER_TIMEOUT);
    CHECK(op->done());
    CHECK_EQ(op->status().kind, MR_TRANSFER_TIMEOUT);
    CHECK_EQ(op->remote_state, MR_UNKNOWN);
    std::fill(here.begin(), here.end(), 0xee);  // must not be seen there: it is the application's again
    // A write begun now must not be overtaken by what is left of the old one.
    const Bytes fresh(8 * kMiB, 0x22);
    const OpRef next = pair.user.write(region, 0, fresh.data(), fresh.size());
    pair.proxy.allow(Proxy::up, Proxy::kUnlimited);
    CHECK_EQ(TcpSide::wait(next), MR_OK);
    CHECK(std::equal(fresh.begin(), fresh.end(), owned.begin()));
    CHECK(std::all_of(owned.begin() + static_cast<ptrdiff_t>(fresh.size()), owned.end(),
                      [](uint8_t byte) { return byte == 0 || byte == 0x11; }));
  }
}

TEST(a_write_that_never_left_was_not_written) {
  Bytes owned(100, 0), here(100, 1);
  TcpPair pair;
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  pair.proxy.allow(Proxy::up, 0);  // not even the greeting passes
  const OpRef op = pair.user.write(region, 0, here.data(), here.size());
  pair.user.stop(op, MR_TRANSFER_TIMEOUT);
  CHECK(op->done());
  CHECK_EQ(op->remote_state, MR_NOT_WRITTEN);
}

TEST(a_socket_that_breaks_is_fenced_and_its_parts_are_repeated) {
  for (const Verb verb : {Verb::read, Verb::write}) {
    TcpPair pair(with_sockets(2));
    pair.begin();
    const Bytes source = noise(64 * kMiB);
    Bytes owned = source, here = source;
    (verb == Verb::read ? here : owned).assign(source.size(), 0);
    const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
    const auto direction = verb == Verb::read ? Proxy::down : Proxy::up;
    pair.proxy.allow(direction, 7 * kMiB);
    const View all = View::contiguous(0, source.size());
    const OpRef op = pair.user.start(verb, region, all, here.data(), all);
    CHECK(pair.proxy.await_stall(direction));
    pair.proxy.cut();
    pair.proxy.allow(direction, Proxy::kUnlimited);
    CHECK_EQ(TcpSide::wait(op), MR_OK);
    CHECK(owned == source && here == source);
    CHECK(op->retries >= 1);
    CHECK(pair.user.counter("tcp_sockets_lost") >= 1);
    CHECK(pair.user.counter("requests") >= 1);
    if (verb == Verb::write) CHECK_EQ(op->remote_state, MR_WRITTEN);
  }
}

TEST(who_waits_is_told_of_a_socket_that_only_the_owner_has_lost) {
  Bytes owned = noise(64 * kMiB), here(owned.size());
  TcpPair pair(with_sockets(2));
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  pair.proxy.allow(Proxy::down, 7 * kMiB);
  const OpRef op = pair.user.read(region, 0, here.data(), here.size());
  CHECK(pair.proxy.await_stall(Proxy::down));
  pair.proxy.cut_far_side();
  pair.proxy.allow(Proxy::down, Proxy::kUnlimited);
  CHECK_EQ(TcpSide::wait(op), MR_OK);
  CHECK(owned == here);
  CHECK(op->retries >= 1);
}

TEST(a_part_that_breaks_its_socket_again_and_again_fails) {
  Bytes owned(100), here(100);
  TcpPair pair;
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  constexpr uint64_t kGreeting = sizeof(tcp::Welcome);
  pair.proxy.allow(Proxy::down, kGreeting);
  const OpRef op = pair.user.read(region, 0, here.data(), here.size());
  for (int i = 0; i < 4; ++i) {
    CHECK(pair.owner.await_count("tcp_bytes_served", 100 * (i + 1)));
    pair.proxy.cut();
    pair.proxy.allow(Proxy::down, kGreeting);
  }
  CHECK_EQ(TcpSide::wait(op), MR_PEER_LOST);
  CHECK_EQ(op->retries.load(), 3u);
  CHECK(op->status().text.find("broke 4 times") != std::string::npos);
}

TEST(nothing_is_reachable_and_the_operation_is_handed_back) {
  TcpPair pair;
  HostPort nowhere = pair.owner.at();
  {
    const Fd taken = tcp_listen({"127.0.0.1", 0}, 0, 4, &nowhere);
  }  // a port that nobody listens on
  pair.user.meet(pair.owner, nowhere);
  pair.begin();
  Bytes owned(100), here(100);
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  const OpRef op = pair.user.read(region, 0, here.data(), here.size());
  CHECK_EQ(TcpSide::wait(op), kUnreachable);
  CHECK(op->status().text.find(nowhere.text()) != std::string::npos);
  CHECK(op->status().text.find("Connection refused") != std::string::npos);
}

TEST(the_next_address_is_tried_where_one_fails) {
  TcpPair pair;
  HostPort nowhere = pair.owner.at();
  {
    const Fd taken = tcp_listen({"127.0.0.1", 0}, 0, 4, &nowhere);
  }
  pair.user.meet(pair.owner, nowhere);
  pair.user.look_also_at(pair.proxy.at());
  pair.begin();
  Bytes owned = noise(100), here(100);
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_OK);
  CHECK(here == owned);
}

TEST(loopback_comes_first_on_the_same_host) {
  TcpPair pair;
  // An address that no host has: it would cost the whole connect timeout.
  pair.user.look_only_at({"192.0.2.1", pair.proxy.at().port}, boot_id());
  pair.begin();
  Bytes owned = noise(100), here(100);
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_OK);
  CHECK_EQ(pair.proxy.connections(), 1u);
}

TEST(the_end_of_the_peer_ends_everything) {
  Bytes owned = noise(64 * kMiB), here(64 * kMiB), small(8);
  TcpPair pair;
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  pair.proxy.allow(Proxy::down, kMiB);
  const OpRef large = pair.user.read(region, 0, here.data(), here.size());
  CHECK(pair.proxy.await_stall(Proxy::down));
  const OpRef ops[] = {large, pair.user.read(region, 0, small.data(), 8),
                       pair.user.write(region, 0, here.data(), here.size())};
  pair.user.close(fail(MR_PEER_LOST, "its process has ended"));
  for (const auto& op : ops) {
    CHECK(op->done());
    CHECK_EQ(op->status().kind, MR_PEER_LOST);
    CHECK(op->status().text.find("its process has ended") != std::string::npos);
  }
  CHECK_EQ(pair.user.ends(), 3u);
  CHECK_EQ(pair.user.doubled_ends(), 0u);
}

// ---- Strangers ----

namespace {

// A connection by hand. Every wait is bounded.
class Raw {
 public:
  explicit Raw(const HostPort& at) : socket_(tcp_connect_start(at, 4)) { wait_for(POLLOUT); }
  // The next connection that arrives at the listener.
  explicit Raw(const Fd& listener) {
    pollfd polled{listener.get(), POLLIN, 0};
    if (::poll(&polled, 1, 60000) != 1) throw std::runtime_error("nobody comes");
    socket_ = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }

  void close() { socket_.reset(); }

  void say(const Bytes& said) {
    if (::send(socket_.get(), said.data(), said.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(said.size()))
      throw std::runtime_error("can't send to the door");
  }
  // So many bytes, or fewer where the other side closed.
  Bytes hear(size_t length) {
    Bytes heard;
    while (heard.size() < length) {
      wait_for(POLLIN);
      uint8_t buffer[4096];
      const ssize_t got = ::recv(socket_.get(), buffer, std::min(sizeof buffer, length - heard.size()), 0);
      if (got <= 0) break;
      heard.insert(heard.end(), buffer, buffer + got);
    }
    return heard;
  }

 private:
  void wait_for(short events) {
    pollfd polled{socket_.get(), events, 0};
    if (::poll(&polled, 1, 60000) != 1) throw std::runtime_error("the door does not answer");
  }

  Fd socket_;
};

// What is answered to a greeting: a welcome, or nothing.
Bytes say(const HostPort& at, const Bytes& said) {
  Raw raw(at);
  raw.say(said);
  return raw.hear(sizeof(tcp::Welcome));
}

tcp::Hello hello_of(TcpSide& side, uint64_t number) {
  tcp::Hello hello;
  hello.session = side.session();
  hello.number = number;
  random_bytes(hello.nonce, sizeof hello.nonce);
  hello.proof = tcp::client_proof(side.key(), hello, Digest{});
  return hello;
}

template <typename T>
Bytes bytes_of(const T& value) {
  const auto* const p = reinterpret_cast<const uint8_t*>(&value);
  return {p, p + sizeof value};
}

}  // namespace

TEST(strangers_are_shown_out_without_a_word) {
  TcpPair pair;
  pair.begin();
  tcp::Hello good = hello_of(pair.user, 77);
  for (size_t i = 0; i < sizeof good; ++i) {
    Bytes bad = bytes_of(good);
    bad[i] ^= 1;  // each byte counts: magic, version, session, number, nonce, proof
    CHECK_EQ(say(pair.owner.at(), bad).size(), 0u);
  }
  CHECK_EQ(say(pair.owner.at(), noise(200)).size(), 0u);
  CHECK(say(pair.owner.at(), Bytes{22, 3, 1, 0, 5, 9, 9, 9, 9, 9}).size() < sizeof(tcp::Welcome));  // TLS, but no more

  // The proof is the only thing that was missing.
  const Bytes answer = say(pair.owner.at(), bytes_of(good));
  CHECK_EQ(answer.size(), sizeof(tcp::Welcome));
  tcp::Welcome welcome;
  std::memcpy(&welcome, answer.data(), sizeof welcome);
  CHECK(welcome.proof == tcp::server_proof(pair.user.key(), good, welcome, Digest{}));
  // Said again by someone who only listened, it is worth nothing.
  CHECK_EQ(say(pair.owner.at(), bytes_of(good)).size(), 0u);
}

TEST(a_silent_stranger_is_shown_out_in_time) {
  mr_options options = Options::defaults();
  options.connect_timeout = 0.2;
  TcpPair pair(options);
  pair.begin();
  CHECK_EQ(say(pair.owner.at(), Bytes{'M', 'R'}).size(), 0u);
}

TEST(a_recorded_greeting_opens_no_second_door) {
  Bytes owned(8), here(8);
  TcpPair pair;
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_OK);
  const Bytes recorded = pair.proxy.recorded(sizeof(tcp::Hello));
  CHECK_EQ(recorded.size(), sizeof(tcp::Hello));
  CHECK_EQ(say(pair.owner.at(), recorded).size(), 0u);
}

TEST(a_fenced_socket_that_arrives_late_is_refused) {
  TcpPair pair;
  pair.begin();
  const tcp::Hello late = hello_of(pair.user, 5);
  pair.owner.on_loop([&] {
    const Bytes frame = Writer().put(late.session).put(late.number).take();
    Reader in(frame);
    std::vector<Fd> fds;
    Reply reply;
    pair.owner.link().on_frame_on_loop(kTcpFence, in, fds, reply);
  });
  CHECK_EQ(say(pair.owner.at(), bytes_of(late)).size(), 0u);
  CHECK_EQ(say(pair.owner.at(), bytes_of(hello_of(pair.user, 6))).size(), sizeof(tcp::Welcome));
}

TEST(a_drop_between_a_request_and_its_bytes_keeps_them_out) {
  Bytes owned(100, 1);
  TcpPair pair;
  pair.begin();
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  Raw raw(pair.owner.at());
  raw.say(bytes_of(hello_of(pair.user, 1)));
  CHECK_EQ(raw.hear(sizeof(tcp::Welcome)).size(), sizeof(tcp::Welcome));

  Bytes request(tcp::kMaxRequestBytes);
  request.resize(
      tcp::encode_request(tcp::RequestKind::write, 1, region.name, View::contiguous(0, 100), 0, 100, request.data()));
  raw.say(request);
  CHECK(pair.owner.await_count("heard", 1));
  pair.owner.drop(region);
  tcp::Chunk chunk;
  chunk.id = 1;
  chunk.length = 100;
  Bytes rest = bytes_of(chunk);
  rest.resize(rest.size() + 100, 2);
  chunk.length = 0;
  chunk.last = 1;
  const Bytes end = bytes_of(chunk);
  rest.insert(rest.end(), end.begin(), end.end());
  raw.say(rest);

  const Bytes answer = raw.hear(sizeof chunk);
  CHECK_EQ(answer.size(), sizeof chunk);
  std::memcpy(&chunk, answer.data(), sizeof chunk);
  CHECK_EQ(chunk.kind, MR_ACCESS_DENIED);
  CHECK_EQ(chunk.touched, 0);
  CHECK(owned == Bytes(100, 1));
}

TEST(plain_sockets_are_refused_where_tls_is_demanded) {
  TcpPair pair(with_tls());
  pair.begin();
  CHECK_EQ(say(pair.owner.at(), bytes_of(hello_of(pair.user, 1))).size(), 0u);
}

TEST(a_server_that_is_not_the_peer_gets_no_request) {
  TcpPair pair;
  pair.proxy.corrupt(Proxy::down, 30);  // of the welcome's proof
  pair.begin();
  Bytes owned(8), here(8, 9), before = here;
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  const OpRef op = pair.user.read(region, 0, here.data(), here.size());
  CHECK_EQ(TcpSide::wait(op), kUnreachable);
  CHECK(op->status().text.find("is not the peer") != std::string::npos);
  CHECK_EQ(pair.owner.counter("tcp_bytes_served"), 0u);
  CHECK(here == before);
}

TEST(another_key_or_session_leads_nowhere) {
  for (const bool wrong_key : {false, true}) {
    Bytes owned(8), here(8);
    TcpPair pair;
    pair.begin();
    const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
    const uint64_t session = pair.user.session();
    const Digest key = pair.user.key();
    // The owner's door asks the user's side for the right ones: say wrong ones, on the wire only.
    pair.proxy.corrupt(Proxy::up, wrong_key ? 50 : 9);
    const OpRef op = pair.user.read(region, 0, here.data(), here.size());
    CHECK_EQ(TcpSide::wait(op), kUnreachable);
    CHECK(op->status().text.find("closed the data socket during the greeting") != std::string::npos);
    CHECK(session == pair.user.session() && key == pair.user.key());
    // Once it is right, it works: a failure is not for ever.
    pair.proxy.stop_corrupting();
    CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_OK);
  }
}

TEST(a_data_socket_that_overtakes_the_last_proof_of_its_session_waits_for_it) {
  TcpPair pair;
  pair.owner.know_sessions_from(after(0.7));  // a lost packet comes again after 0.2 s, and after 0.4 more
  pair.begin();
  Bytes owned(8, 7), here(8);
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_OK);
  CHECK(here == owned);
}

TEST(a_crowd_of_silent_strangers_keeps_nobody_out) {
  TcpPair pair;
  pair.begin();
  std::vector<Fd> crowd;
  for (int i = 0; i < 400; ++i) crowd.push_back(tcp_connect_start(pair.owner.at(), 4));
  Bytes owned(8, 3), here(8);
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_OK);
  CHECK(here == owned);
}

namespace {

// The owner's end by hand: welcomes the user and takes its first request.
tcp::Request take_request(Raw& raw, TcpSide& user) {
  tcp::Hello hello;
  const Bytes said = raw.hear(sizeof hello);
  CHECK_EQ(said.size(), sizeof hello);
  std::memcpy(&hello, said.data(), sizeof hello);
  tcp::Welcome welcome;
  welcome.proof = tcp::server_proof(user.key(), hello, welcome, Digest{});
  raw.say(bytes_of(welcome));
  tcp::Request request;
  const Bytes asked = raw.hear(sizeof request);
  CHECK_EQ(asked.size(), sizeof request);
  std::memcpy(&request, asked.data(), sizeof request);
  return request;
}

}  // namespace

TEST(an_end_right_behind_the_last_bytes_is_seen) {
  TcpPair pair;
  HostPort at;
  const Fd listener = tcp_listen({"127.0.0.1", 0}, 0, 4, &at);
  pair.user.meet(pair.owner, at);
  pair.begin();
  Bytes owned(100), here(100);
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  const OpRef op = pair.user.read(region, 0, here.data(), here.size());
  Raw first(listener);
  tcp::Chunk chunk;
  chunk.id = take_request(first, pair.user).id;
  chunk.length = 100;
  Bytes half = bytes_of(chunk);
  half.resize(half.size() + 50, 1);
  // On the loop's own thread, which looks at its sockets only after that: it finds the bytes and the end together.
  std::atomic<bool> ended{false};
  pair.user.loop().post([&] {
    first.say(half);
    first.close();
    ended = true;
    ended.notify_all();
  });
  ended.wait(false);

  Raw second(listener);
  chunk.id = take_request(second, pair.user).id;
  Bytes whole = bytes_of(chunk);
  whole.resize(whole.size() + 100, 2);
  chunk.length = 0;
  chunk.last = 1;
  const Bytes end = bytes_of(chunk);
  whole.insert(whole.end(), end.begin(), end.end());
  second.say(whole);
  CHECK_EQ(TcpSide::wait(op), MR_OK);
  CHECK_EQ(op->retries.load(), 1u);
  CHECK(here == Bytes(100, 2));
}

TEST(garbage_from_the_server_is_a_protocol_error) {
  TcpPair pair;
  pair.proxy.corrupt(Proxy::down, sizeof(tcp::Welcome));  // the id of the first answer
  pair.begin();
  Bytes owned(8), here(8);
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_PROTOCOL);
}

TEST(garbage_from_the_client_closes_its_socket) {
  TcpPair pair;
  pair.proxy.corrupt(Proxy::up, sizeof(tcp::Hello) + 2);  // the request's reserved bytes
  pair.begin();
  Bytes owned(8), here(8);
  const RemoteRegion region = pair.owner.share(owned.data(), owned.size());
  // The client sees a socket that breaks: it tries again, a few times, and says so.
  CHECK_EQ(TcpSide::wait(pair.user.read(region, 0, here.data(), here.size())), MR_PEER_LOST);
  CHECK_EQ(pair.owner.counter("tcp_malformed"), 4u);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
