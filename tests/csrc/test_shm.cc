// The shm lane: two sides in one process, or the owner in a process of its own.
#include <spawn.h>

#include <array>
#include <random>

#include "check.h"
#include "pattern.h"
#include "shm_side.h"
#include "transport/transfer.h"
#include "view_copy.h"

using namespace mr;
using namespace mr::test;

namespace {

// A thread of a test may be held up for longer than a copy takes: what races with a copy is tried again.
constexpr int kTries = 500;

const std::pair<bool, const char*> kModes[] = {{true, "shm-mapped"}, {false, "shm-process_vm"}};

// ---- A process of its own, driven by frames ----

enum Command : uint16_t { kMake = 9000, kDropRegion, kAdd, kPainted };

Reply serve_command(Side& side, uint16_t type, Reader& in) {
  static std::map<uint64_t, std::pair<RegionRef, std::unique_ptr<Memory>>> made;
  Reply reply;
  if (type == kMake) {
    const auto size = in.get<uint64_t>();
    const auto shared = in.get<uint8_t>() != 0;
    const auto seed = in.get<uint64_t>();
    auto memory = std::make_unique<Memory>(side, size, shared);
    paint(memory->base, size, seed);
    auto region = side.regions().create(memory->base, size, kBoth);
    reply.payload = side.describe(*region).encode();
    made[region->id] = {region, std::move(memory)};
    return reply;
  }
  auto& [region, memory] = made.at(in.get<uint64_t>());
  if (type == kDropRegion) {
    reply.payload = Writer().put(static_cast<uint8_t>(side.drop(region->id))).take();
  } else if (type == kAdd) {  // in a thread, so that the loop stays free
    std::thread([word = reinterpret_cast<uint64_t*>(region->base), times = in.get<uint64_t>()] {
      for (uint64_t i = 0; i < times; ++i) std::atomic_ref(word[0]).fetch_add(1);
      std::atomic_ref(word[1]).store(times);
    }).detach();
  } else if (type == kPainted) {
    const auto offset = in.get<uint64_t>(), length = in.get<uint64_t>(), seed = in.get<uint64_t>();
    reply.payload = Writer().put(static_cast<uint8_t>(painted(region->base + offset, length, seed))).take();
  }
  return reply;
}

int run_owner(int fd, int parent) {
  Side side(Fd(fd), parent, Options::defaults(), make_shm, serve_command);
  while (!side.closed()) ::usleep(1000);
  return 0;
}

class OwnerProcess {
 public:
  explicit OwnerProcess(const mr_options& raw = options(true, true)) {
    auto sockets = socket_pair();
    const int inherited = ::dup(sockets.first.get());  // without CLOEXEC
    const std::string fd = std::to_string(inherited), parent = std::to_string(::getpid());
    const char* argv[] = {"owner", "--owner", fd.c_str(), parent.c_str(), nullptr};
    if (::posix_spawn(&pid_, "/proc/self/exe", nullptr, nullptr, const_cast<char**>(argv), environ) != 0)
      throw std::runtime_error("posix_spawn");
    ::close(inherited);
    sockets.first.reset();
    reader = std::make_unique<Side>(std::move(sockets.second), pid_, raw);
  }
  ~OwnerProcess() {
    reader.reset();
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);  // it ends with the socket
  }
  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  RemoteRegion make(uint64_t size, bool shared, uint64_t seed) {
    Reply reply = reader->ask(kMake, Writer().put(size).put(static_cast<uint8_t>(shared)).put(seed).take());
    return RemoteRegion::decode(reply.payload);
  }
  uint8_t ask(Command command, Bytes payload) {
    Reply reply = reader->ask(command, std::move(payload));
    return reply.payload.empty() ? 0 : reply.payload[0];
  }

  std::unique_ptr<Side> reader;

 private:
  pid_t pid_ = 0;
};

}  // namespace

// ---- Bytes ----

TEST(every_size_and_offset_in_both_directions) {
  for (auto [shared, lane] : kModes) {
    Pair pair;
    const uint64_t room = 3 * kMiB;
    Memory memory(pair.owner, room, shared);
    const RemoteRegion remote = pair.region(memory.base, room);
    Bytes local(room);
    for (uint64_t size : {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{8}, uint64_t{4095}, uint64_t{4096},
                          uint64_t{4097}, 256 * 1024 + uint64_t{1}, kMiB - 1, kMiB, kMiB + 1}) {
      for (uint64_t offset : {uint64_t{0}, uint64_t{1}, uint64_t{4093}}) {
        paint(memory.base, room, size);
        std::memset(local.data(), 0xEE, local.size());
        const OpRef read = pair.reader.submit(pair.reader.read(remote, offset, local.data() + 5, size));
        CHECK_EQ(pair.reader.wait(read), MR_OK);
        CHECK_EQ(std::string(read->lane), std::string(lane));
        CHECK(painted(local.data() + 5, size, size, offset));
        CHECK(local[4] == 0xEE && local[5 + size] == 0xEE);

        std::memset(memory.base, 0xEE, room);
        paint(local.data(), size, offset + 99);
        const OpRef write = pair.reader.submit(pair.reader.write(remote, offset, local.data(), size));
        CHECK_EQ(pair.reader.wait(write), MR_OK);
        CHECK_EQ(write->remote_state, MR_WRITTEN);
        CHECK(painted(memory.base + offset, size, offset + 99));
        CHECK(memory.base[offset + size] == 0xEE && (offset == 0 || memory.base[offset - 1] == 0xEE));
      }
    }
    CHECK_EQ(pair.reader.doubled_ends(), 0u);
  }
}

TEST(large_transfers_by_several_threads) {
  for (auto [shared, lane] : kModes) {
    Pair pair(options(true, true, 3));
    const uint64_t size = kLarge + 4099;
    Memory memory(pair.owner, size, shared);
    const RemoteRegion remote = pair.region(memory.base, size);
    paint(memory.base, size, 5);
    Bytes local(size);
    const OpRef read = pair.reader.submit(pair.reader.read(remote, 0, local.data(), size));
    CHECK_EQ(pair.reader.wait(read), MR_OK);
    CHECK(painted(local.data(), size, 5));
    CHECK_EQ(std::string(read->lane), std::string(lane));
    CHECK(read->chunks >= 3 && read->rails >= 1 && read->rails <= 3);
    CHECK_EQ(pair.reader.counter("shm_read_bytes"), size);
    paint(local.data(), size, 6);
    CHECK_EQ(pair.reader.run(pair.reader.write(remote, 0, local.data(), size)), MR_OK);
    CHECK(painted(memory.base, size, 6));
    CHECK_EQ(pair.reader.counter("shm_write_bytes"), size);
  }
}

// A view with the bytes of `shape` elements of `run` bytes each, laid out with gaps; bytes() of them in `span` bytes.
View random_view(std::mt19937_64& random, const std::vector<uint64_t>& shape, uint64_t run, uint64_t* span) {
  const auto below = [&](uint64_t limit) { return random() % limit; };
  mr_view raw{};
  raw.offset = below(9);
  raw.run = run;
  raw.ndim = static_cast<uint32_t>(shape.size());
  uint64_t extent = run;
  for (uint32_t dim = raw.ndim; dim-- > 0;) {
    raw.count[dim] = shape[dim];
    raw.stride[dim] = extent + (below(3) == 0 ? 0 : below(2) == 0 ? below(20) : below(9000));
    extent = raw.stride[dim] * (shape[dim] - 1) + extent;
  }
  *span = raw.offset + extent;
  return View::from(raw);
}

TEST(strided_on_both_ends) {
  std::mt19937_64 random(7);
  for (auto [shared, lane] : kModes) {
    Pair pair;
    for (int round = 0; round < 60; ++round) {
      std::vector<uint64_t> shape(1 + random() % 4);
      for (auto& count : shape) count = 1 + random() % 6;
      if (round % 10 == 0) shape = {2 + random() % 3000};
      const uint64_t run = 1 + random() % (round % 3 == 0 ? 3000 : 9);
      uint64_t here_span, there_span;
      const View here = random_view(random, shape, run, &here_span),
                 there = random_view(random, shape, run, &there_span);
      Memory memory(pair.owner, there_span, shared);
      const RemoteRegion remote = pair.region(memory.base, there_span);
      paint(memory.base, there_span, round);
      Bytes local(here_span, 0xEE), wanted = local;
      test::copy_views(wanted.data(), here, memory.base, there, 0, here.bytes());
      const auto submit = [&](const OpRef& op) {
        return pair.reader.wait(round % 2 == 0 ? pair.reader.submit(op) : pair.reader.start(op));
      };
      CHECK_EQ(submit(pair.reader.transfer(Verb::read, remote, there, local.data(), here)), MR_OK);
      CHECK(local == wanted);

      Bytes remote_wanted(memory.base, memory.base + there_span);
      paint(local.data(), here_span, round + 1000);
      test::copy_views(remote_wanted.data(), there, local.data(), here, 0, here.bytes());
      CHECK_EQ(submit(pair.reader.transfer(Verb::write, remote, there, local.data(), here)), MR_OK);
      CHECK(std::equal(remote_wanted.begin(), remote_wanted.end(), memory.base));
    }
  }
}

TEST(large_strided_transfers_in_chunks) {
  for (auto [shared, lane] : kModes) {
    Pair pair;
    const mr_view raw{.offset = 1, .run = 6000, .ndim = 1, .count = {4000}, .stride = {7001}};
    const View there = View::from(raw), here = View::contiguous(0, there.bytes());
    Memory memory(pair.owner, 29 * kMiB, shared);
    const RemoteRegion remote = pair.region(memory.base, 29 * kMiB);
    paint(memory.base, 29 * kMiB, 3);
    Bytes local(there.bytes()), wanted(there.bytes());
    test::copy_views(wanted.data(), here, memory.base, there, 0, here.bytes());
    CHECK_EQ(pair.reader.run(pair.reader.transfer(Verb::read, remote, there, local.data(), here)), MR_OK);
    CHECK(local == wanted);
    std::memset(memory.base, 0, 29 * kMiB);
    CHECK_EQ(pair.reader.run(pair.reader.transfer(Verb::write, remote, there, local.data(), here)), MR_OK);
    std::memset(local.data(), 0, local.size());
    test::copy_views(local.data(), here, memory.base, there, 0, here.bytes());
    CHECK(local == wanted);
    CHECK(all(memory.base + 1 + 6000, 1001, 0));  // the gaps are left alone
  }
}

// ---- Rights ----

void check_denied(Pair& pair, const RemoteRegion& remote, Verb verb, int kind, const char* words) {
  for (uint64_t length : {uint64_t{16}, 2 * kMiB}) {
    Bytes local(length, 0xEE);
    const OpRef op = verb == Verb::read ? pair.reader.read(remote, 0, local.data(), length)
                                        : pair.reader.write(remote, 0, local.data(), length);
    CHECK_EQ(pair.reader.run(op), kind);
    CHECK(op->status().text.find(words) != std::string::npos);
    CHECK_EQ(op->remote_state, MR_NOT_WRITTEN);
    CHECK(all(local.data(), length, 0xEE));
  }
}

TEST(wrong_keys_rights_and_ranges_are_refused) {
  for (auto [shared, lane] : kModes) {
    Pair pair;
    Memory memory(pair.owner, 4 * kMiB, shared);
    const RemoteRegion remote = pair.region(memory.base, 4 * kMiB);
    RemoteRegion bad = remote;
    bad.name.key.word[1] ^= 1;
    check_denied(pair, bad, Verb::read, MR_ACCESS_DENIED, "never granted");
    Bytes one(1);
    CHECK_EQ(pair.reader.run(pair.reader.read(remote, 0, one.data(), 1)), MR_OK);  // mapped from here on
    check_denied(pair, bad, Verb::write, MR_ACCESS_DENIED, "never granted");
    bad = remote;
    bad.name.id += 1;
    check_denied(pair, bad, Verb::read, MR_ACCESS_DENIED, "never granted");
    bad = remote;
    bad.base += 8;
    check_denied(pair, bad, Verb::read, MR_ACCESS_DENIED, "range");
    bad = remote;
    bad.size += 8;
    check_denied(pair, bad, Verb::read, MR_ACCESS_DENIED, "range");
    bad = remote;
    bad.slot = kBoardSlots - 1;
    check_denied(pair, bad, Verb::read, MR_ACCESS_DENIED, "never granted");
    bad.slot = kBoardSlots;
    check_denied(pair, bad, Verb::read, MR_ACCESS_DENIED, "board");

    check_denied(pair, pair.region(memory.base, 4 * kMiB, MR_READ), Verb::write, MR_ACCESS_DENIED,
                 "does not grant write");
    check_denied(pair, pair.region(memory.base, 4 * kMiB, MR_WRITE), Verb::read, MR_ACCESS_DENIED,
                 "does not grant read");
    Bytes local(16);
    CHECK_EQ(pair.reader.run(pair.reader.read(remote, 4 * kMiB - 15, local.data(), 16)), MR_OUT_OF_BOUNDS);
    CHECK_EQ(pair.reader.run(pair.reader.read(remote, 4 * kMiB - 16, local.data(), 16)), MR_OK);
    CHECK_EQ(pair.reader.doubled_ends(), 0u);
  }
}

TEST(forged_offset_in_shared_memory_is_refused) {
  Pair pair;
  Memory memory(pair.owner, 4 * kMiB, true);
  RemoteRegion remote = pair.region(memory.base + kMiB, kMiB);
  CHECK_EQ(remote.shared_offset, kMiB);
  for (uint64_t offset : {uint64_t{0}, 3 * kMiB, uint64_t{1} << 60}) {
    remote.shared_offset = offset;
    check_denied(pair, remote, Verb::read, MR_ACCESS_DENIED, "range");
  }
}

TEST(a_dropped_region_is_refused_and_its_slot_serves_the_next) {
  for (auto [shared, lane] : kModes) {
    Pair pair;
    Memory memory(pair.owner, 2 * kMiB, shared);
    const RemoteRegion remote = pair.region(memory.base, 2 * kMiB);
    Bytes local(kMiB);
    CHECK_EQ(pair.reader.run(pair.reader.read(remote, 0, local.data(), 16)), MR_OK);
    CHECK(pair.owner.drop(remote.name.id));
    check_denied(pair, remote, Verb::read, MR_ACCESS_DENIED, "dropped");
    const RemoteRegion next = pair.region(memory.base, 2 * kMiB);
    CHECK_EQ(next.slot, remote.slot);
    check_denied(pair, remote, Verb::write, MR_ACCESS_DENIED, "dropped");
    CHECK_EQ(pair.reader.run(pair.reader.read(next, 0, local.data(), 16)), MR_OK);
  }
}

// A transfer whose only chunk drops the region: what the checks around an access are for.
class DroppedOnTheWay : public Transfer {
 public:
  DroppedOnTheWay(Side& reader, const OpRef& op, Ledger& ledger, const Closing& closing, std::function<void()> drop,
                  Region& region)
      : Transfer(reader, op, ledger, closing, {op, nullptr}), drop_(std::move(drop)), region_(region) {}
  const char* lane() const override { return "test"; }
  const char* counter() const override { return "test"; }
  Status admit() override { return {}; }
  bool live() const override { return !region_.dropped; }
  Status move(uint64_t, uint64_t) override {
    changed() = true;
    drop_();
    return {};
  }

  std::function<void()> drop_;
  Region& region_;
};

TEST(a_region_dropped_between_the_first_and_the_last_byte_denies_the_operation) {
  Pair pair;
  std::array<LedgerEntry, kLedgerEntries> entries{};
  Ledger ledger(entries.data());
  const Closing closing;
  uint64_t word = 0;
  for (Verb verb : {Verb::read, Verb::write}) {
    const RegionRef region = pair.owner.regions().create(&word, 8, kBoth);
    const uint64_t id = region->id;
    const OpRef op = pair.reader.op(verb, pair.owner.describe(*region));
    op->remote_view = op->local_view = View::contiguous(0, 8);
    DroppedOnTheWay transfer(
        pair.reader, op, ledger, closing,
        [&] {
          pair.owner.regions().end_access(id);
          CHECK(ledger.names(id));  // a drop waits now
        },
        *region);
    CHECK(transfer.run_inline());
    CHECK(!ledger.names(id));
    CHECK_EQ(op->status().kind, MR_ACCESS_DENIED);
    CHECK(op->status().text.find("discarded") != std::string::npos);
    CHECK_EQ(op->remote_state, verb == Verb::read ? MR_NOT_WRITTEN : MR_UNKNOWN);
  }
}

TEST(a_drop_ends_a_long_copy_at_its_next_chunk) {
  Pair pair;
  std::array<LedgerEntry, kLedgerEntries> entries{};
  Ledger ledger(entries.data());
  const Closing closing;
  Bytes memory(64 * kMiB);
  const RegionRef region = pair.owner.regions().create(memory.data(), memory.size(), kBoth);
  const OpRef op = pair.reader.op(Verb::read, pair.owner.describe(*region));
  int moves = 0;
  const auto drop = [&] {
    ++moves;
    pair.owner.regions().end_access(region->id);
  };
  CopyPool::of_process()->submit(std::make_shared<DroppedOnTheWay>(pair.reader, op, ledger, closing, drop, *region),
                                 memory.size(), 1);
  CHECK_EQ(Side::wait(op), MR_ACCESS_DENIED);
  CHECK_EQ(moves, 1);
}

TEST(a_drop_waits_for_a_copy_in_flight) {
  for (auto [shared, lane] : kModes) {
    int denied = 0;
    Pair pair(options(true, true, 1));
    const uint64_t size = kLong;
    Memory memory(pair.owner, size, shared);
    Bytes local(size);
    for (int round = 0; round < 3 || (denied == 0 && round < kTries); ++round) {
      const RemoteRegion remote = pair.region(memory.base, size);
      const OpRef op = pair.reader.start(pair.reader.read(remote, 0, local.data(), size));
      while (!pair.owner.link().touches(remote.name.id) && !op->done()) std::this_thread::yield();
      CHECK(pair.owner.drop(remote.name.id));
#ifndef __SANITIZE_THREAD__  // which does not see that two mappings of the ledger are one memory
      // The entry is wiped after the last byte: from here on nothing is read or written.
      std::memset(local.data(), 0xEE, size);
#endif
      const int kind = Side::wait(op);
      CHECK(kind == MR_OK || kind == MR_ACCESS_DENIED);
#ifndef __SANITIZE_THREAD__
      CHECK(all(local.data(), size, 0xEE));
#endif
      denied += kind == MR_ACCESS_DENIED;
    }
    CHECK(denied > 0);
  }
}

// ---- Ends ----

TEST(a_stop_ends_a_long_copy_and_nothing_is_written_after_it) {
  for (auto [shared, lane] : kModes) {
    int stopped = 0;
    Pair pair;
    const uint64_t size = kLong;
    Memory memory(pair.owner, size, shared);
    Bytes local(size, 1);
    const RemoteRegion remote = pair.region(memory.base, size);
    for (int round = 0; round < 4 || (stopped == 0 && round < kTries); ++round) {
      const int kind = round % 2 == 0 ? MR_CANCELLED : MR_TRANSFER_TIMEOUT;
      const OpRef op = pair.reader.start(round % 3 == 0 ? pair.reader.write(remote, 0, local.data(), size)
                                                        : pair.reader.read(remote, 0, local.data(), size));
      while (!pair.owner.link().touches(remote.name.id) && !op->done()) std::this_thread::yield();
      pair.reader.stop(op, kind);
      const int end = Side::wait(op);
      CHECK(end == MR_OK || end == kind);
      if (end == MR_OK) continue;
      ++stopped;
      if (op->verb == Verb::write) CHECK(op->remote_state == MR_UNKNOWN || op->remote_state == MR_NOT_WRITTEN);
      std::memset(local.data(), 0xEE, size);
      CHECK(!pair.owner.link().touches(remote.name.id));
      CHECK(all(local.data(), size, 0xEE));
    }
    CHECK(stopped > 0);
    CHECK_EQ(pair.reader.doubled_ends(), 0u);
  }
}

TEST(closing_the_link_ends_every_operation_once) {
  for (auto [shared, lane] : kModes) {
    int lost = 0;
    for (int round = 0; lost == 0 && round < kTries; ++round) {
      Pair pair;
      const uint64_t size = kLong / 4;
      Memory memory(pair.owner, size, shared);
      const RemoteRegion remote = pair.region(memory.base, size);
      std::vector<Bytes> locals(6, Bytes(size));
      std::vector<OpRef> ops;
      for (auto& local : locals) ops.push_back(pair.reader.start(pair.reader.read(remote, 0, local.data(), size)));
      pair.reader.close(fail(MR_PEER_LOST, "the test says so"));
      for (const auto& op : ops) {
        const int kind = Side::wait(op);
        CHECK(kind == MR_OK || kind == MR_PEER_LOST);
        lost += kind == MR_PEER_LOST;
      }
      CHECK_EQ(pair.reader.ends(), ops.size());
      CHECK_EQ(pair.reader.doubled_ends(), 0u);
      CHECK(!pair.reader.link().try_inline(pair.reader.read(remote, 0, locals[0].data(), 8)));
      CHECK_EQ(Side::wait(pair.reader.start(pair.reader.read(remote, 0, locals[0].data(), 8))), MR_PEER_LOST);
    }
    CHECK(lost > 0);
  }
}

TEST(operations_that_wait_for_the_peer_end_at_a_stop_and_at_the_end_of_the_link) {
  auto sockets = socket_pair();  // nobody answers at the other end
  Side reader(std::move(sockets.second), ::getpid());
  RemoteRegion remote;
  remote.size = 64;
  Bytes local(64);
  CHECK_EQ(reader.link().refuses(*reader.read(remote, 0, local.data(), 64)), std::string());
  const OpRef stopped = reader.submit(reader.read(remote, 0, local.data(), 64));
  const OpRef closed = reader.submit(reader.read(remote, 0, local.data(), 64));
  reader.stop(stopped, MR_CANCELLED);
  CHECK_EQ(Side::wait(stopped), MR_CANCELLED);
  CHECK(!closed->done());
  sockets.first.reset();
  CHECK_EQ(Side::wait(closed), MR_PEER_LOST);
  CHECK_EQ(reader.doubled_ends(), 0u);
}

TEST(a_killed_owner) {
  for (auto [shared, lane] : kModes) {
    OwnerProcess owner;
    Side& reader = *owner.reader;
    const uint64_t size = 2 * kLong;
    const RemoteRegion remote = owner.make(size, shared, 4);
    Bytes local(size);
    CHECK_EQ(reader.run(reader.read(remote, 100, local.data(), 5000)), MR_OK);
    CHECK(painted(local.data(), 5000, 4, 100));
    CHECK_EQ(reader.run(reader.write(remote, 0, local.data(), 5000)), MR_OK);
    CHECK_EQ(
        owner.ask(kPainted, Writer().put(remote.name.id).put(uint64_t{0}).put(uint64_t{0}).put(uint64_t{0}).take()), 1);
    const OpRef op = reader.start(reader.read(remote, 0, local.data(), size));
    owner.kill();
    const int kind = Side::wait(op);
    CHECK(kind == MR_OK || kind == MR_PEER_LOST);
    while (!reader.closed()) std::this_thread::yield();
    CHECK_EQ(Side::wait(reader.submit(reader.read(remote, 0, local.data(), 8))), MR_PEER_LOST);
    CHECK_EQ(reader.doubled_ends(), 0u);
  }
}

// ---- Reads that need no operation ----

TEST(a_read_at_once_or_not_at_all) {
  for (auto [shared, lane] : kModes) {
    Pair pair;
    constexpr uint64_t kSize = 2 * kMiB;
    Memory memory(pair.owner, kSize, shared);
    paint(memory.base, kSize, 6);
    const RemoteRegion remote = pair.region(memory.base, kSize);
    Bytes local(kSize, 0xEE);
    Link& link = pair.reader.link();
    if (shared) CHECK(link.read_now(remote, local.data(), 0, 8) == nullptr);  // not mapped yet
    CHECK_EQ(pair.reader.run(pair.reader.read(remote, 0, local.data(), 8)), MR_OK);
    for (uint64_t size : {uint64_t{1}, uint64_t{8}, uint64_t{4097}, kMiB}) {
      std::memset(local.data(), 0xEE, kSize);
      const char* const taken = link.read_now(remote, local.data() + 5, 4093, size);
      CHECK(taken != nullptr && std::string(taken) == lane);
      CHECK(painted(local.data() + 5, size, 6, 4093));
      CHECK(local[4] == 0xEE && local[5 + size] == 0xEE);
      CHECK(!pair.owner.link().touches(remote.name.id));
    }
    std::memset(local.data(), 0xEE, kSize);
    RemoteRegion guessed = remote, beyond = remote;
    guessed.name.key.word[1] ^= 1;
    beyond.size += 1;
    const RemoteRegion write_only = pair.region(memory.base, kSize, MR_WRITE);
    for (auto& [handle, offset, length] :
         std::initializer_list<std::tuple<RemoteRegion, uint64_t, uint64_t>>{{guessed, 0, 8},
                                                                             {beyond, kSize, 1},
                                                                             {write_only, 0, 8},
                                                                             {remote, kSize - 7, 8},
                                                                             {remote, UINT64_MAX, 8},
                                                                             {remote, 8, UINT64_MAX},
                                                                             {remote, 0, kMiB + 1}})
      CHECK(link.read_now(handle, local.data(), offset, length) == nullptr);
    CHECK_EQ(local[0], 0xEE);
    CHECK(pair.owner.drop(remote.name.id));
    CHECK(link.read_now(remote, local.data(), 0, 8) == nullptr);
    CHECK_EQ(local[0], 0xEE);
  }
}

TEST(a_drop_waits_for_reads_at_once_and_the_end_of_the_link_ends_them) {
  for (auto [shared, lane] : kModes) {
    Pair pair;
    constexpr uint64_t kSize = 256 << 10;
    Memory memory(pair.owner, kSize, shared);
    paint(memory.base, kSize, 1);
    const RemoteRegion remote = pair.region(memory.base, kSize), other = pair.region(memory.base, kSize);
    Bytes local(kSize);
    CHECK_EQ(pair.reader.run(pair.reader.read(remote, 0, local.data(), kSize)), MR_OK);
    std::atomic<int> good{0}, wrong{0};
    std::thread reading([&] {
      while (pair.reader.link().read_now(remote, local.data(), 0, kSize) != nullptr)
        (painted(local.data(), kSize, 1) ? good : wrong) += 1;
    });
    while (good + wrong == 0) std::this_thread::yield();
    CHECK(pair.owner.drop(remote.name.id));
    paint(memory.base, kSize, 2);  // nobody is in it any more
    reading.join();
    CHECK_EQ(wrong.load(), 0);
    CHECK(pair.reader.link().read_now(other, local.data(), 0, 8) != nullptr);
    pair.reader.close(fail(MR_PEER_LOST, "the test says so"));
    CHECK(pair.reader.link().read_now(other, local.data(), 0, 8) == nullptr);
  }
}

// ---- Many at once ----

TEST(a_copy_notices_the_owners_death_without_the_loop) {
  for (auto [shared, lane] : kModes) {
    OwnerProcess owner;
    Side& reader = *owner.reader;
    const RemoteRegion remote = owner.make(8 << 20, shared, 4);
    Bytes got(8 << 20);
    CHECK_EQ(reader.run(reader.read(remote, 0, got.data(), got.size())), MR_OK);
    CHECK_EQ(reader.run(reader.read(remote, 0, got.data(), 8)), MR_OK);
    reader.on_loop([&] {  // so that nobody reads the end of the connection meanwhile
      owner.kill();
      for (const uint64_t size : {uint64_t{8}, uint64_t{256} << 10})
        CHECK_EQ(Side::wait(reader.submit(reader.read(remote, 0, got.data(), size))), MR_PEER_LOST);
    });
  }
}

TEST(many_threads_at_once) {
  for (auto [shared, lane] : kModes) {
    Pair pair(options(true, true, 2));
    constexpr uint64_t kEach = 3 * kMiB;
    constexpr int kThreads = 8;
    Memory memory(pair.owner, kEach * kThreads, shared);
    const RemoteRegion remote = pair.region(memory.base, kEach * kThreads);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        std::mt19937_64 random(t);
        Bytes out(kEach), back(kEach);
        for (int round = 0; round < 40; ++round) {
          const uint64_t length = round % 8 == 0 ? random() % kEach : random() % 5000;
          const uint64_t offset = t * kEach + random() % (kEach - length);
          paint(out.data(), length, round);
          wrong += pair.reader.run(pair.reader.write(remote, offset, out.data(), length)) != MR_OK;
          wrong += pair.reader.run(pair.reader.read(remote, offset, back.data(), length)) != MR_OK;
          wrong += !painted(back.data(), length, round);
        }
      });
    for (auto& thread : threads) thread.join();
    CHECK_EQ(wrong, 0);
    CHECK_EQ(pair.reader.doubled_ends(), 0u);
    CHECK(pair.owner.drop(remote.name.id, 0));
  }
}

TEST(a_full_ledger_makes_an_operation_wait_and_a_stop_ends_the_waiting) {
  std::array<LedgerEntry, kLedgerEntries> entries{};
  Ledger ledger(entries.data());
  std::vector<LedgerClaim> claims;
  for (uint32_t i = 0; i < kLedgerEntries; ++i) {
    claims.push_back(ledger.claim(100 + i));
    CHECK(bool(claims.back()));
  }
  CHECK(!ledger.claim(1));
  CHECK(ledger.names(100) && ledger.names(100 + kLedgerEntries - 1) && !ledger.names(1));

  Pair pair;
  uint64_t word = 0;
  const RegionRef region = pair.owner.regions().create(&word, 8, kBoth);
  const Closing closing;
  const auto make = [&] {
    const OpRef op = pair.reader.op(Verb::read, pair.owner.describe(*region));
    op->remote_view = op->local_view = View::contiguous(0, 8);
    return std::make_shared<DroppedOnTheWay>(pair.reader, op, ledger, closing, [] {}, *region);
  };
  CHECK(!make()->run_inline());
  const auto pool = CopyPool::of_process();
  const auto waits = make();
  const OpRef op = pair.reader.op(Verb::read, pair.owner.describe(*region));
  const auto stopped = std::make_shared<DroppedOnTheWay>(pair.reader, op, ledger, closing, [] {}, *region);
  pool->submit(stopped, 8, 2);
  op->stop_kind = MR_CANCELLED;
  CHECK_EQ(Side::wait(op), MR_CANCELLED);
  const auto helper = pool->submit(waits, 8, 2);
  claims.clear();
  helper->help(*op, Time::max());
  while (pair.reader.ends() < 2) std::this_thread::yield();
  for (auto& entry : entries) CHECK_EQ(entry.region_id.load(), 0);
}

TEST(atomics_of_two_processes_on_one_word) {
  constexpr uint64_t kTimes = 100000;
  OwnerProcess owner;
  Side& reader = *owner.reader;
  const RemoteRegion remote = owner.make(4096, true, 0);
  std::array<uint64_t, 2> words{};
  CHECK_EQ(reader.run(reader.write(remote, 0, words.data(), 16)), MR_OK);  // mapped from here on
  owner.ask(kAdd, Writer().put(remote.name.id).put(kTimes).take());
  for (uint64_t i = 0; i < kTimes; ++i) {
    const OpRef op = reader.atomic(Verb::fetch_add, remote, 0, 2);
    CHECK(reader.link().try_inline(op));
    CHECK_EQ(op->status().kind, MR_OK);
  }
  while (words[1] != kTimes) CHECK_EQ(reader.run(reader.read(remote, 0, words.data(), 16)), MR_OK);
  CHECK_EQ(words[0], 3 * kTimes);

  OpRef swap = reader.atomic(Verb::compare_and_swap, remote, 0, 1, 9);
  CHECK(reader.link().try_inline(swap));
  CHECK_EQ(swap->value, 3 * kTimes);
  swap = reader.atomic(Verb::compare_and_swap, remote, 0, 3 * kTimes, 9);
  CHECK(reader.link().try_inline(swap));
  CHECK_EQ(swap->value, 3 * kTimes);
  const OpRef last = reader.atomic(Verb::fetch_add, remote, 0, 0);
  CHECK(reader.link().try_inline(last));
  CHECK_EQ(last->value, 9);
}

TEST(atomics_that_the_lane_leaves_to_the_owner) {
  Pair pair;
  Memory plain(pair.owner, 64, false), shared(pair.owner, 64, true);
  CHECK(!pair.reader.link().try_inline(pair.reader.atomic(Verb::fetch_add, pair.region(plain.base, 64), 0, 1)));
  const RemoteRegion remote = pair.region(shared.base, 64), unaligned = pair.region(shared.base + 4, 32);
  CHECK(!pair.reader.link().try_inline(pair.reader.atomic(Verb::fetch_add, remote, 0, 1)));  // not mapped yet
  uint64_t local = 0;
  CHECK_EQ(pair.reader.run(pair.reader.write(remote, 0, &local, 8)), MR_OK);
  CHECK(!pair.reader.link().try_inline(pair.reader.atomic(Verb::fetch_add, unaligned, 0, 1)));
  const OpRef outside = pair.reader.atomic(Verb::fetch_add, remote, 64, 1);
  CHECK(pair.reader.link().try_inline(outside));
  CHECK_EQ(outside->status().kind, MR_OUT_OF_BOUNDS);
  const OpRef denied = pair.reader.atomic(Verb::fetch_add, pair.region(shared.base, 64, MR_WRITE), 0, 1);
  CHECK(pair.reader.link().try_inline(denied));
  CHECK_EQ(denied->status().kind, MR_ACCESS_DENIED);
}

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--owner") return run_owner(std::atoi(argv[2]), std::atoi(argv[3]));
  return mr::test::run(argc, argv);
}
