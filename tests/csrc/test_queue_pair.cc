// Queue pairs and the handles below them, on the fake fabric.
#include <algorithm>
#include <numeric>

#include "check.h"
#include "fake_verbs.h"
#include "transport/queue_pair.h"

using namespace mr;
using mr::test::FakeFabric;

namespace {

constexpr int kRemote = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
constexpr int kAll = IBV_ACCESS_LOCAL_WRITE | kRemote;

struct Heard : QueuePair::Sink {
  void on_done(QueuePair&, std::span<Work> done) override {
    std::lock_guard guard(lock);
    for (Work& work : done) ended.push_back(work.begin);
    changed.notify_all();
  }
  void on_broken(QueuePair& pair) override {
    std::lock_guard guard(lock);
    ++broken;
    why = pair.failure();
    changed.notify_all();
  }
  void on_quiet(QueuePair&) override {
    std::lock_guard guard(lock);
    ++quiet;
    changed.notify_all();
  }
  bool await(size_t count) {
    std::unique_lock guard(lock);
    return changed.wait_for(guard, std::chrono::seconds(20), [&] { return ended.size() >= count; });
  }
  bool await_broken() {
    std::unique_lock guard(lock);
    return changed.wait_for(guard, std::chrono::seconds(20), [&] { return broken > 0; });
  }

  std::mutex lock;
  std::condition_variable changed;
  std::vector<uint64_t> ended;
  int broken = 0, quiet = 0;
  QueuePairFailure why;
};

// Two connected queue pairs on two cards, and memory on both sides.
struct Wire {
  explicit Wire(QueuePairLimits limits = {}, bool immediate = false) : fabric(immediate) {
    fabric.add_card("fake0", 0);
    fabric.add_card("fake1", 1);
    connect(limits);
  }
  ~Wire() {
    for (auto* pair : {&ours, &theirs})
      if (*pair) (*pair)->shut();
  }

  void connect(QueuePairLimits limits) {
    here = VerbsContext::open(FakeFabric::verbs(), "fake0");
    there = VerbsContext::open(FakeFabric::verbs(), "fake1");
    domain = std::make_shared<ProtectionDomain>(here);
    their_domain = std::make_shared<ProtectionDomain>(there);
    QueuePairPath path;
    ours = std::make_shared<QueuePair>(domain, std::make_shared<CompletionChannel>(here), 1, heard, limits, path, 0);
    theirs = std::make_shared<QueuePair>(their_domain, std::make_shared<CompletionChannel>(there), 2,
                                         std::weak_ptr<QueuePair::Sink>{}, limits, path, kRemote);
    path.global = true;
    path.retries = 6;  // not for ever
    path.gid = fabric.card("fake1").port.gids[0];
    ours->connect(path, theirs->ours());
    path.gid = fabric.card("fake0").port.gids[0];
    theirs->connect(path, ours->ours());
    local.resize(1 << 16);
    remote.resize(1 << 16);
    std::iota(remote.begin(), remote.end(), uint8_t{1});
    local_region = std::make_unique<MemoryRegion>(domain, local.data(), local.size(), IBV_ACCESS_LOCAL_WRITE);
    remote_region = std::make_unique<MemoryRegion>(their_domain, remote.data(), remote.size(), kAll);
  }

  ibv_sge piece(uint64_t offset, uint32_t length) {
    return {reinterpret_cast<uintptr_t>(local.data()) + offset, length, local_region->lkey()};
  }
  uint64_t far(uint64_t offset) const { return reinterpret_cast<uintptr_t>(remote.data()) + offset; }
  static Work work(uint64_t name) {
    Work out;
    out.begin = name;
    return out;
  }
  void read(uint64_t name, uint64_t offset, uint32_t length) {
    QueuePair::Batch batch(*ours, true);
    CHECK(batch.has_room());
    const ibv_sge sge = piece(offset, length);
    batch.add(work(name), IBV_WR_RDMA_READ, {&sge, 1}, far(offset), remote_region->rkey());
  }
  // As the poller does.
  void poll_until(size_t count) {
    for (const Time limit = after(20); heard->ended.size() < count && Clock::now() < limit;) ours->drain(true);
    CHECK_EQ(heard->ended.size(), count);
  }
  void poll_until_broken() {
    for (const Time limit = after(20); heard->broken == 0 && Clock::now() < limit;) ours->drain(true);
    CHECK_EQ(heard->broken, 1);
  }

  FakeFabric fabric;
  std::shared_ptr<Heard> heard = std::make_shared<Heard>();
  VerbsContextRef here, there;
  ProtectionDomainRef domain, their_domain;
  QueuePairRef ours, theirs;
  std::vector<uint8_t> local, remote;
  std::unique_ptr<MemoryRegion> local_region, remote_region;
};

}  // namespace

TEST(handles_close_children_before_parents) {
  FakeFabric fabric;
  fabric.add_card("fake0");
  {
    auto context = VerbsContext::open(FakeFabric::verbs(), "fake0");
    auto domain = std::make_shared<ProtectionDomain>(context);
    auto channel = std::make_shared<CompletionChannel>(context);
    CompletionQueue queue(channel, 16, nullptr);
    uint8_t bytes[64];
    MemoryRegion region(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
    context.reset();
    domain.reset();
    channel.reset();
    CHECK_EQ(fabric.open("context"), 1);
  }
  for (const char* what : {"context", "pd", "channel", "cq", "mr"}) CHECK_EQ(fabric.open(what), 0);
  CHECK(fabric.violations().empty());
}

TEST(failed_calls_keep_errno_and_what_was_asked) {
  FakeFabric fabric;
  fabric.add_card("fake0");
  auto context = VerbsContext::open(FakeFabric::verbs(), "fake0");
  auto domain = std::make_shared<ProtectionDomain>(context);
  uint8_t bytes[64];
  fabric.fail_call("reg_mr", ENOMEM);
  try {
    MemoryRegion region(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.status().kind, MR_REGISTRATION);
    CHECK_EQ(error.status().sys_errno, ENOMEM);
    CHECK(error.status().text.find("ibv_reg_mr of 64 bytes") == 0);
    CHECK(error.status().text.find("fake0") != std::string::npos);
  }
  CHECK_THROWS(Error, VerbsContext::open(FakeFabric::verbs(), "fake7"));
  for (const char* call : {"open_device", "query_device"}) {
    fabric.fail_call(call, EACCES);
    CHECK_THROWS(Error, VerbsContext::open(FakeFabric::verbs(), "fake0"));
  }
  CHECK_EQ(fabric.open("context"), 1);
}

TEST(a_queue_pair_that_can_not_be_made_leaves_nothing) {
  Wire wire;
  const int pairs = wire.fabric.open("qp"), queues = wire.fabric.open("cq");
  for (const char* call : {"create_cq", "create_qp", "modify_qp"}) {
    wire.fabric.fail_call(call, ENOMEM);
    CHECK_THROWS(Error, QueuePair(wire.domain, std::make_shared<CompletionChannel>(wire.here), 3, {}, {}, {}, 0));
    CHECK_EQ(wire.fabric.open("qp"), pairs);
    CHECK_EQ(wire.fabric.open("cq"), queues);
  }
}

TEST(limits_are_lowered_to_what_the_card_grants) {
  FakeFabric fabric;
  auto& card = fabric.add_card("fake0");
  card.attributes.max_qp_wr = 32;
  card.attributes.max_sge = 3;
  card.attributes.max_qp_init_rd_atom = 2;
  card.attributes.max_qp_rd_atom = 1;
  card.max_inline = 60;
  auto context = VerbsContext::open(FakeFabric::verbs(), "fake0");
  QueuePairLimits wanted;
  wanted.max_inline = 220;
  QueuePair pair(std::make_shared<ProtectionDomain>(context), std::make_shared<CompletionChannel>(context), 1, {},
                 wanted, {}, 0);
  CHECK_EQ(pair.limits().depth, 32u);
  CHECK_EQ(pair.limits().max_sge, 3u);
  CHECK_EQ(pair.limits().rd_atomic, 2u);
  CHECK_EQ(pair.limits().responder, 1u);
  CHECK_EQ(pair.limits().max_inline, 55u);
}

TEST(a_read_brings_the_bytes_and_ends_once) {
  Wire wire;
  wire.read(7, 100, 50);
  wire.poll_until(1);
  CHECK_EQ(wire.heard->ended[0], 7u);
  CHECK(std::equal(wire.local.begin() + 100, wire.local.begin() + 150, wire.remote.begin() + 100));
  CHECK_EQ(wire.local[99], 0);
  CHECK_EQ(wire.local[150], 0);
  CHECK_EQ(wire.ours->drain(true), 0u);
  CHECK_EQ(wire.ours->outstanding(), 0u);
}

TEST(one_doorbell_and_one_completion_for_a_batch) {
  Wire wire;
  wire.fabric.keep_log(true);
  {
    QueuePair::Batch batch(*wire.ours, true);
    for (uint64_t i = 0; i < 20; ++i) {
      const ibv_sge sges[2] = {wire.piece(i * 64, 10), wire.piece(i * 64 + 20, 5)};
      batch.add(Wire::work(i), IBV_WR_RDMA_READ, sges, wire.far(i * 64), wire.remote_region->rkey());
    }
  }
  wire.poll_until(20);
  const auto log = wire.fabric.requests();
  CHECK_EQ(log.size(), 20u);
  CHECK_EQ(std::count_if(log.begin(), log.end(), [](const auto& request) { return request.signalled; }), 1);
  CHECK(log.back().signalled);
  for (uint64_t i = 0; i < 20; ++i) {
    CHECK_EQ(wire.heard->ended[i], i);
    CHECK_EQ(wire.local[i * 64 + 9], wire.remote[i * 64 + 9]);
    CHECK_EQ(wire.local[i * 64 + 20], wire.remote[i * 64 + 10]);
  }
}

TEST(the_ring_goes_round_and_its_room_is_kept) {
  QueuePairLimits limits;
  limits.depth = 8;
  Wire wire(limits);
  std::atomic<bool> open{false};
  wire.fabric.decide(
      [&](const auto&) { return FakeFabric::Fate{open ? FakeFabric::Fate::carry_out : FakeFabric::Fate::hold}; });
  for (uint64_t i = 0; i < 8; ++i) wire.read(i, i * 8, 8);
  {
    QueuePair::Batch batch(*wire.ours, true);
    CHECK(!batch.has_room());
  }
  open = true;
  wire.fabric.kick();
  wire.poll_until(8);
  for (uint64_t i = 8; i < 1000; ++i) {
    wire.read(i, i * 8, 8);
    wire.poll_until(i + 1);
  }
  for (uint64_t i = 0; i < 1000; ++i) CHECK_EQ(wire.heard->ended[i], i);
  CHECK(wire.fabric.violations().empty());
}

TEST(inlined_bytes_are_taken_at_once) {
  QueuePairLimits limits;
  limits.max_inline = 64;
  Wire wire(limits);
  uint64_t word = 0x1122334455667788;
  {
    QueuePair::Batch batch(*wire.ours, true);
    const ibv_sge sge{reinterpret_cast<uintptr_t>(&word), sizeof word, 0};  // not registered
    batch.add(Wire::work(0), IBV_WR_RDMA_WRITE, {&sge, 1}, wire.far(8), wire.remote_region->rkey(), true);
    batch.post();
    word = 0;
  }
  wire.poll_until(1);
  std::memcpy(&word, wire.remote.data() + 8, sizeof word);
  CHECK_EQ(word, 0x1122334455667788u);
}

TEST(atomics) {
  Wire wire;
  uint64_t word = 40, old = 0;
  std::memcpy(wire.remote.data() + 64, &word, sizeof word);
  const ibv_sge result = wire.piece(0, 8);
  {
    QueuePair::Batch batch(*wire.ours, true);
    batch.add_atomic(Wire::work(0), IBV_WR_ATOMIC_FETCH_AND_ADD, result, wire.far(64), wire.remote_region->rkey(), 2,
                     0);
  }
  wire.poll_until(1);
  std::memcpy(&old, wire.local.data(), sizeof old);
  std::memcpy(&word, wire.remote.data() + 64, sizeof word);
  CHECK_EQ(old, 40u);
  CHECK_EQ(word, 42u);
  {
    QueuePair::Batch batch(*wire.ours, true);
    batch.add_atomic(Wire::work(1), IBV_WR_ATOMIC_CMP_AND_SWP, result, wire.far(64), wire.remote_region->rkey(), 42, 9);
  }
  wire.poll_until(2);
  std::memcpy(&word, wire.remote.data() + 64, sizeof word);
  CHECK_EQ(word, 9u);
}

TEST(every_way_to_fail_keeps_its_first_cause_and_ends_nothing_twice) {
  for (const ibv_wc_status status :
       {IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_MW_BIND_ERR, IBV_WC_BAD_RESP_ERR,
        IBV_WC_LOC_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR,
        IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_REM_ABORT_ERR, IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR,
        IBV_WC_GENERAL_ERR}) {
    for (const auto kind : {FakeFabric::Fate::fail_before, FakeFabric::Fate::fail_after}) {
      Wire wire;
      wire.fabric.fail_request(5, {kind, status, 0x77});
      for (uint64_t i = 0; i < 10; ++i) wire.read(i, i * 16, 16);
      wire.poll_until_broken();
      wire.ours->shut();
      CHECK_EQ(wire.heard->broken, 1);
      CHECK_EQ(wire.heard->ended.size(), 4u);
      CHECK_EQ(wire.heard->why.status, status);
      CHECK_EQ(wire.heard->why.vendor_error, 0x77u);
      CHECK(wire.heard->why.why.text.find(completion_text(status)) == 0);
      uint64_t first = 0;
      const auto left = wire.ours->take_unfinished(&first);
      CHECK_EQ(left.size(), 6u);
      CHECK_EQ(first, 4u);
      CHECK_EQ(wire.heard->why.sequence, 4u);
      for (uint64_t i = 0; i < 6; ++i) CHECK_EQ(left[i].begin, 4 + i);
      CHECK_EQ(std::all_of(wire.local.begin() + 80, wire.local.end(), [](uint8_t byte) { return byte == 0; }), true);
      QueuePair::Batch batch(*wire.ours, true);
      CHECK(!batch.has_room());
    }
  }
}

TEST(real_reasons_to_fail) {
  const auto cause = [](const std::function<void(Wire&)>& spoil, ibv_wr_opcode opcode = IBV_WR_RDMA_READ) {
    Wire wire;
    spoil(wire);
    {
      QueuePair::Batch batch(*wire.ours, true);
      const ibv_sge sge = wire.piece(0, 64);
      batch.add(Wire::work(0), opcode, {&sge, 1}, wire.far(wire.remote.size() - 64), wire.remote_region->rkey());
    }
    for (const Time limit = after(20); wire.heard->broken == 0 && wire.heard->ended.empty() && Clock::now() < limit;)
      wire.ours->drain(true);
    return wire.heard->why.status;
  };
  CHECK_EQ(cause([](Wire&) {}), IBV_WC_SUCCESS);
  CHECK_EQ(cause([](Wire& wire) { wire.theirs->shut(); }), IBV_WC_RETRY_EXC_ERR);
  CHECK_EQ(cause([](Wire& wire) { wire.fabric.set_port("fake1", false); }), IBV_WC_RETRY_EXC_ERR);
  const auto smaller = [](Wire& wire) {
    wire.remote_region = std::make_unique<MemoryRegion>(wire.their_domain, wire.remote.data(), 1000, kAll);
  };
  CHECK_EQ(cause(smaller), IBV_WC_REM_ACCESS_ERR);
  const auto read_only = [](Wire& wire) {
    wire.remote_region = std::make_unique<MemoryRegion>(wire.their_domain, wire.remote.data(), wire.remote.size(),
                                                        IBV_ACCESS_REMOTE_READ);
  };
  CHECK_EQ(cause(read_only, IBV_WR_RDMA_READ), IBV_WC_SUCCESS);
  CHECK_EQ(cause(read_only, IBV_WR_RDMA_WRITE), IBV_WC_REM_ACCESS_ERR);
  const auto local_read_only = [](Wire& wire) {
    wire.local_region = std::make_unique<MemoryRegion>(wire.domain, wire.local.data(), wire.local.size(), 0);
  };
  CHECK_EQ(cause(local_read_only), IBV_WC_LOC_PROT_ERR);
}

TEST(calls_that_fail_break_the_pair_and_leave_its_requests_to_whoever_asks) {
  for (const char* call : {"post_send", "req_notify_cq", "poll_cq"}) {
    Wire wire;
    wire.fabric.fail_call(call, EINVAL);
    wire.read(0, 0, 8);
    wire.poll_until_broken();
    CHECK_EQ(wire.heard->why.why.kind, MR_PEER_LOST);
    CHECK(wire.heard->why.why.text.find(std::string("ibv_") + call) == 0);
    wire.ours->shut();
    uint64_t first = 0;
    CHECK_EQ(wire.ours->take_unfinished(&first).size() + wire.heard->ended.size(), 1u);
  }
}

TEST(what_had_completed_is_not_lost_when_the_pair_is_shut) {
  Wire wire({}, true);  // carried out before post returns, polled by nobody
  for (uint64_t i = 0; i < 5; ++i) wire.read(i, i * 8, 8);
  wire.ours->shut();
  CHECK_EQ(wire.heard->ended.size(), 5u);
  uint64_t first = 0;
  CHECK(wire.ours->take_unfinished(&first).empty());
}

TEST(a_lost_completion_is_among_the_unfinished) {
  Wire wire;
  wire.fabric.fail_request(2, {FakeFabric::Fate::lose});
  for (uint64_t i = 0; i < 2; ++i) wire.read(i, i * 8, 8);
  wire.poll_until(1);
  wire.ours->shut();
  uint64_t first = 0;
  CHECK_EQ(wire.ours->take_unfinished(&first).size(), 1u);
  CHECK_EQ(first, 1u);
}

TEST(threads_post_and_poll_at_once) {
  QueuePairLimits limits;
  limits.depth = 16;
  Wire wire(limits);
  constexpr uint64_t kEach = 300;
  std::atomic<bool> done{false};
  std::thread poller([&] {
    while (!done)
      if (wire.ours->drain(false) == 0) std::this_thread::yield();
  });
  std::vector<std::thread> posters;
  for (uint64_t t = 0; t < 3; ++t)
    posters.emplace_back([&, t] {
      for (uint64_t i = 0; i < kEach;) {
        std::this_thread::yield();
        QueuePair::Batch batch(*wire.ours, false);
        for (; batch.has_room() && i < kEach; ++i) {
          const ibv_sge sge = wire.piece(t * 4096, 8);
          batch.add(Wire::work(t * kEach + i), IBV_WR_RDMA_READ, {&sge, 1}, wire.far(0), wire.remote_region->rkey());
        }
      }
    });
  for (auto& poster : posters) poster.join();
  CHECK(wire.heard->await(3 * kEach));
  done = true;
  poller.join();
  std::sort(wire.heard->ended.begin(), wire.heard->ended.end());
  for (uint64_t i = 0; i < 3 * kEach; ++i) CHECK_EQ(wire.heard->ended[i], i);
  CHECK(wire.fabric.violations().empty());
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
