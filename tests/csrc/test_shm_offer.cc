// The shm lane: how two sides get to know each other's memory, and what they refuse.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "check.h"
#include "pattern.h"
#include "shm_side.h"
#include "transport/shm_board.h"

using namespace mr;
using namespace mr::test;

namespace {

// An owner that answers with what a test gives it.
struct FakeOwner {
  explicit FakeOwner(const mr_options& raw = options(true, true)) : FakeOwner(raw, socket_pair()) {}
  FakeOwner(const mr_options& raw, std::pair<Fd, Fd> sockets)
      : side(std::move(sockets.first), ::getpid(), Options::defaults(), make_fake),
        reader(std::move(sockets.second), ::getpid(), raw) {}

  struct Fake final : Link {
    const char* lane() const override { return "fake"; }
    std::string refuses(const Op&) const override { return "fake"; }
    bool try_inline(const OpRef&) override { return false; }
    void start_on_loop(const OpRef&) override {}
    void stop_on_loop(const OpRef&) override {}
    void close_on_loop(const Status&) override {}
    void on_frame_on_loop(uint16_t type, Reader& in, std::vector<Fd>& fds, Reply& reply) override {
      if (type == kShmMap) {
        reply.payload = Writer().put(map_address).take();
        reply.fd = Fd(::dup(map_fd));
        return;
      }
      const std::lock_guard guard(lock);
      last_offer = in.get<uint8_t>();
      if (last_offer == 3) refusal = in.text(4096);
      if (!fds.empty()) ledger = std::move(fds.front());
    }
    bool touches(uint64_t) const override { return false; }
    void map_on_loop(const OpRef&) override {}
    const char* lane_for(const RemoteRegion&) const override { return "fake"; }

    std::mutex lock;
    int last_offer = 0, map_fd = -1;
    uint64_t map_address = 0;
    std::string refusal;
    Fd ledger;
  };
  static std::shared_ptr<Link> make_fake(LinkHost&) { return std::make_shared<Fake>(); }
  Fake& fake() { return static_cast<Fake&>(side.link()); }
  struct Signs {
    uint32_t line = 0;
    uint64_t word = 0, word_address = 0, life_offset = 0;
    uint32_t life_word = 0;
  };
  void offer(uint8_t what, const Fd* fd) { offer(what, fd, Signs{}); }
  void offer(uint8_t what, const Fd* fd, const Signs& signs) {
    Writer out;
    out.put(what);
    if (what == 2)
      out.put(uint32_t{4711})
          .put(signs.line)
          .put(signs.word)
          .put(signs.word_address)
          .put(signs.life_offset)
          .put(signs.life_word);
    side.on_loop([&] { side.send_on_loop(kShmOffer, out.take(), fd); });
  }
  std::string refusal_of(const OpRef& op) {
    while (reader.link().refuses(*op).empty()) std::this_thread::yield();
    return reader.link().refuses(*op);
  }

  Side side, reader;
};

Fd unsealed(uint64_t size) {
  Fd fd(static_cast<int>(::syscall(SYS_memfd_create, "unsealed", 1u | 2u)));
  CHECK_EQ(::ftruncate(fd.get(), static_cast<off_t>(size)), 0);
  return fd;
}

}  // namespace

TEST(memory_that_could_shrink_or_is_too_small_is_not_mapped) {
  RemoteRegion remote;
  uint8_t byte;
  const std::pair<Fd, const char*> offers[] = {{unsealed(kBoardSlots * sizeof(BoardSlot)), "not sealed"},
                                               {make_memfd("small", 4096), "bytes"},
                                               {Fd(), "without its descriptor"}};
  for (const auto& [fd, words] : offers) {
    FakeOwner owner;
    owner.offer(2, fd.valid() ? &fd : nullptr);
    const OpRef op = owner.reader.read(remote, 0, &byte, 0);
    CHECK(owner.refusal_of(op).find(words) != std::string::npos);
    CHECK_EQ(owner.reader.run(op), kUnavailable);
  }
  for (const auto& [fd, words] : offers) {  // as a ledger: then the owner refuses, and says why
    if (std::string(words) == "bytes") continue;
    FakeOwner owner;
    owner.offer(1, fd.valid() ? &fd : nullptr);
    const auto refusal = [&] {
      const std::lock_guard guard(owner.fake().lock);
      return owner.fake().refusal;
    };
    while (refusal().empty()) std::this_thread::yield();
    CHECK(refusal().find(words) != std::string::npos);
  }
}

TEST(the_ledger_is_offered_read_only) {
  FakeOwner owner;
  const auto have = [&] {
    const std::lock_guard guard(owner.fake().lock);
    return owner.fake().ledger.valid();
  };
  while (!have()) std::this_thread::yield();
  CHECK_EQ(::fcntl(owner.fake().ledger.get(), F_GETFL) & O_ACCMODE, O_RDONLY);
  CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, owner.fake().ledger.get(), 0) == MAP_FAILED);
}

TEST(where_mapping_fails_the_kernel_copies_unless_that_is_a_fall_back_too_far) {
  uint64_t value = 42, local = 0;
  FakeOwner owner;
  RegionTable regions;
  const RegionRef region = regions.create(&value, 8, kBoth);
  const Fd board(::dup(regions.board_fd())), bad = unsealed(4096);
  owner.fake().map_fd = bad.get();
  regions.life().give();
  const uint32_t line = regions.write_line(12345);
  const FakeOwner::Signs signs{line, 12345, reinterpret_cast<uint64_t>(&regions.line(line)->live_id),
                               regions.life_offset(), regions.life().value()};
  owner.offer(2, &board, signs);
  RemoteRegion remote = owner.side.describe(*region);
  remote.shared_id = 9;
  const OpRef op = owner.reader.submit(owner.reader.read(remote, 0, &local, 8));
  CHECK_EQ(Side::wait(op), MR_OK);
  CHECK_EQ(local, 42);
  CHECK_EQ(std::string(op->lane), "shm-process_vm");
  CHECK(op->skipped.find("not sealed") != std::string::npos);
  const OpRef strict = owner.reader.read(remote, 0, &local, 8);
  strict->flags = MR_STRICT;
  CHECK_EQ(owner.reader.run(strict), kUnavailable);
  CHECK(strict->status().text.find("not sealed") != std::string::npos);
}

TEST(where_the_kernel_does_not_tell_of_an_end_only_what_is_mapped_is_read) {
  uint64_t value = 42, local = 0;
  FakeOwner owner;
  RegionTable regions;
  const RegionRef region = regions.create(&value, 8, kBoth);
  const Fd board(::dup(regions.board_fd()));
  const uint32_t line = regions.write_line(12345);
  owner.offer(2, &board, {line, 12345, reinterpret_cast<uint64_t>(&regions.line(line)->live_id), 0, 0});
  const OpRef op = owner.reader.submit(owner.reader.read(owner.side.describe(*region), 0, &local, 8));
  CHECK_EQ(Side::wait(op), kUnavailable);
  CHECK(op->status().text.find("robust futexes") != std::string::npos);
}

TEST(signs_that_are_not_on_the_board_end_the_connection) {
  for (const FakeOwner::Signs& bad : {FakeOwner::Signs{.line = kBoardSlots, .life_word = 1},
                                      FakeOwner::Signs{.life_offset = kBoardBytes, .life_word = 1},
                                      FakeOwner::Signs{.life_offset = 2, .life_word = 1}}) {
    RegionTable regions;
    const PeerBoard board(std::make_unique<Mapping>(regions.board_fd(), kBoardBytes, false));
    CHECK_THROWS(Error, board.signs(bad.line, 1, bad.life_offset, bad.life_word));
  }
}

TEST(refusals_say_what_would_help) {
  Pair none(options(false, false));
  uint64_t word = 0, local = 0;
  const RemoteRegion remote = none.region(&word, 8);
  const OpRef op = none.reader.submit(none.reader.read(remote, 0, &local, 8));
  CHECK_EQ(Side::wait(op), kUnavailable);
  CHECK(op->status().text.find("shm_process_vm is off") != std::string::npos);
  const OpRef map = none.reader.op(Verb::map, remote);
  CHECK(none.reader.link().refuses(*map).find("not memory from empty") != std::string::npos);

  Pair unknown(options(true, true), 0);
  const OpRef other = unknown.reader.submit(unknown.reader.read(unknown.region(&word, 8), 0, &local, 8));
  CHECK_EQ(Side::wait(other), kUnavailable);
  CHECK(other->status().text.find("pid namespace") != std::string::npos);
}

// ---- Mappings ----

TEST(map_gives_the_memory_itself_with_the_rights_of_the_region) {
  Pair pair;
  Memory memory(pair.owner, 2 * kMiB, true);
  paint(memory.base, 2 * kMiB, 8);
  for (uint32_t access : {uint32_t{MR_READ}, kBoth}) {
    const RemoteRegion remote = pair.region(memory.base + 4096, kMiB, access);
    const OpRef op = pair.reader.submit(pair.reader.op(Verb::map, remote));
    CHECK_EQ(Side::wait(op), MR_OK);
    CHECK_EQ(op->mapping->writable(), access == kBoth);
    CHECK(painted(op->mapping->address() + remote.shared_offset, kMiB, 8, 4096));
    memory.base[4096] ^= 1;
    CHECK_EQ(op->mapping->address()[remote.shared_offset], memory.base[4096]);
    memory.base[4096] ^= 1;
  }
  RemoteRegion wrong = pair.region(memory.base, kMiB);
  wrong.name.key.word[0] ^= 4;
  wrong.shared_id += 1;  // not mapped yet
  CHECK_EQ(Side::wait(pair.reader.submit(pair.reader.op(Verb::map, wrong))), MR_ACCESS_DENIED);
}

TEST(a_region_that_does_not_grant_write_is_shared_through_a_descriptor_that_can_not_write) {
  Pair pair;
  Memory memory(pair.owner, kMiB, true);
  const auto ask = [&](const RemoteRegion& remote, uint64_t shared_id, bool writable) {
    Writer out;
    out.put(remote.name.id).put(remote.name.key.word[0]).put(remote.name.key.word[1]);
    return pair.reader.ask(kShmMap, out.put(shared_id).put(static_cast<uint8_t>(writable)).take());
  };
  const RemoteRegion read_only = pair.region(memory.base, kMiB, MR_READ), both = pair.region(memory.base, kMiB);
  const Reply reply = ask(read_only, read_only.shared_id, false);
  CHECK_EQ(reply.status.kind, MR_OK);
  CHECK_EQ(::fcntl(reply.fd.get(), F_GETFL) & O_ACCMODE, O_RDONLY);
  CHECK_EQ(::fcntl(ask(both, both.shared_id, true).fd.get(), F_GETFL) & O_ACCMODE, O_RDWR);
  CHECK_EQ(ask(read_only, read_only.shared_id, true).status.kind, MR_ACCESS_DENIED);
  CHECK_EQ(ask(both, both.shared_id + 1, true).status.kind, MR_ACCESS_DENIED);
}

TEST(a_memory_is_asked_for_once_and_forgotten_when_it_is_freed) {
  Pair pair;
  auto memory = std::make_unique<Memory>(pair.owner, kMiB, true);
  const RemoteRegion remote = pair.region(memory->base, kMiB);
  std::vector<OpRef> ops;
  Bytes local(kMiB);
  for (int i = 0; i < 20; ++i) ops.push_back(pair.reader.start(pair.reader.read(remote, 0, local.data() + 64 * i, 64)));
  for (const auto& op : ops) CHECK_EQ(Side::wait(op), MR_OK);
  CHECK(pair.reader.link().try_inline(pair.reader.read(remote, 0, local.data(), kMiB)));

  const OpRef map = pair.reader.submit(pair.reader.op(Verb::map, remote));
  CHECK_EQ(Side::wait(map), MR_OK);
  CHECK(pair.owner.drop(remote.name.id));
  pair.owner.regions().shared_free(memory->base);
  pair.owner.on_loop([&] { pair.owner.send_on_loop(kShmGone, Writer().put(remote.shared_id).take()); });
  while (map->mapping.use_count() != 1) std::this_thread::yield();  // the link holds it no more
  CHECK_EQ(pair.reader.run(pair.reader.read(remote, 0, local.data(), 64)), MR_ACCESS_DENIED);
}

TEST(one_bad_handle_does_not_spoil_a_mapping_for_the_others) {
  Pair pair;
  Memory memory(pair.owner, kMiB, true);
  const RemoteRegion good = pair.region(memory.base, kMiB);
  RemoteRegion bad = good;
  bad.name.key.word[0] ^= 1;
  Bytes local(4 * 64);
  std::vector<OpRef> ops;
  pair.reader.on_loop([&] {
    for (const RemoteRegion& remote : {bad, good, bad, good}) {
      const OpRef op = pair.reader.read(remote, 0, local.data() + 64 * ops.size(), 64);
      ops.push_back(op);
      pair.reader.link().start_on_loop(op);
    }
  });
  for (size_t i = 0; i < ops.size(); ++i) CHECK_EQ(Side::wait(ops[i]), i % 2 == 0 ? MR_ACCESS_DENIED : MR_OK);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
