// Engines talking to each other through the C face: the life of an operation, names, messages, the end of an engine.
#include "engine.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "engine_side.h"

namespace {

struct Buffer {
  Buffer(Engine& owner, Engine& reader, void* memory, uint64_t size, uint32_t access = MR_READ | MR_WRITE) {
    mr_error error{};
    if (mr_region_create(owner.handle, memory, size, access, &region, &error) != MR_OK)
      throw std::runtime_error(error.message);
    std::vector<uint8_t> descriptor(mr_region_descriptor(region, nullptr, 0));
    mr_region_descriptor(region, descriptor.data(), descriptor.size());
    if (mr_remote_open(reader.handle, descriptor.data(), descriptor.size(), &remote, &error) != MR_OK)
      throw std::runtime_error(error.message);
  }
  ~Buffer() {
    mr_remote_close(remote);
    mr_region_close(region);
  }

  mr_region* region = nullptr;
  mr_remote* remote = nullptr;
};

int finish(mr_op* op, mr_result* result = nullptr) {
  CHECK_EQ(mr_op_wait(op, 20), 1);
  mr_result own;
  const int kind = mr_op_result(op, result != nullptr ? result : &own);
  if (kind != MR_OK && std::getenv("MR_TEST_VERBOSE") != nullptr)
    std::fprintf(stderr, "     %s\n", (result != nullptr ? result : &own)->message);
  mr_op_release(op);
  return kind;
}

int transfer(Buffer& buffer, uint32_t verb, void* local, uint64_t offset, uint64_t length, mr_result* result = nullptr,
             uint32_t flags = 0) {
  mr_op* op = nullptr;
  mr_error error{};
  if (const int kind = mr_transfer_bytes(buffer.remote, verb, local, offset, length, 20, flags, &op, &error);
      kind != MR_OK)
    return kind;
  return finish(op, result);
}

void only_tcp(mr_options& options) { options.lanes = "tcp"; }
void over_tls(mr_options& options) { options.same_host_unix = 0; }

}  // namespace

TEST(every_lane_moves_the_same_bytes) {
  for (auto change : {static_cast<void (*)(mr_options&)>(nullptr), only_tcp, over_tls}) {
    Engine owner("owner", change), reader("reader", change);
    std::vector<uint8_t> theirs(1 << 20), ours(1 << 20);
    for (size_t i = 0; i < theirs.size(); ++i) theirs[i] = static_cast<uint8_t>(i * 7);
    Buffer buffer(owner, reader, theirs.data(), theirs.size());
    CHECK_EQ(transfer(buffer, MR_READ, ours.data(), 0, ours.size()), MR_OK);
    CHECK(ours == theirs);
    std::memset(ours.data(), 9, ours.size());
    CHECK_EQ(transfer(buffer, MR_WRITE, ours.data(), 0, ours.size()), MR_OK);
    CHECK(ours == theirs);
  }
}

TEST(bad_arguments_are_refused_before_anything_starts) {
  Engine owner("owner"), reader("reader");
  uint64_t theirs[4] = {}, ours[4] = {};
  Buffer buffer(owner, reader, theirs, sizeof theirs), readable(owner, reader, theirs, sizeof theirs, MR_READ);
  CHECK_EQ(transfer(buffer, MR_READ, ours, 1, sizeof theirs), MR_OUT_OF_BOUNDS);
  CHECK_EQ(transfer(buffer, MR_READ, ours, ~0ull, 2), MR_OUT_OF_BOUNDS);
  CHECK_EQ(transfer(buffer, MR_READ, nullptr, 0, 8), MR_CONFIG);
  CHECK_EQ(transfer(buffer, 3, ours, 0, 8), MR_CONFIG);
  CHECK_EQ(transfer(readable, MR_WRITE, ours, 0, 8), MR_ACCESS_DENIED);
  mr_op* op = nullptr;
  CHECK_EQ(mr_fetch_add(buffer.remote, 4, 1, 1, &op, nullptr), MR_OUT_OF_BOUNDS);
  CHECK_EQ(mr_fetch_add(buffer.remote, 32, 1, 1, &op, nullptr), MR_OUT_OF_BOUNDS);
  CHECK_EQ(mr_fetch_add(readable.remote, 0, 1, 1, &op, nullptr), MR_ACCESS_DENIED);
  mr_region* region = nullptr;
  CHECK_EQ(mr_region_create(owner.handle, theirs, 8, 4, &region, nullptr), MR_CONFIG);
  CHECK_EQ(mr_region_create(owner.handle, nullptr, 8, MR_READ, &region, nullptr), MR_REGISTRATION);
  mr_remote* remote = nullptr;
  CHECK_EQ(mr_remote_open(reader.handle, kSecret, sizeof kSecret, &remote, nullptr), MR_PROTOCOL);
  CHECK_EQ(mr_connect(reader.handle, "nonsense", 1, &op, nullptr), MR_CONFIG);
  CHECK_EQ(mr_connect(reader.handle, nullptr, 1, &op, nullptr), MR_CONFIG);
  CHECK_EQ(owner.counter("ops_in_flight"), 0u);
}

TEST(options_are_checked_by_name) {
  mr_error error{};
  mr_engine* engine = nullptr;
  const auto refused = [&](void (*change)(mr_options&), const char* name) {
    mr_options options;
    mr_options_default(&options);
    change(options);
    CHECK_EQ(mr_engine_create(&options, &engine, &error), MR_CONFIG);
    CHECK(std::string(error.message).find(name) != std::string::npos);
  };
  refused([](mr_options& o) { o.lanes = "shm,carrier-pigeon"; }, "lanes");
  refused([](mr_options& o) { o.tcp_sockets = 0; }, "tcp_sockets");
  refused([](mr_options& o) { o.heartbeat_timeout = -1; }, "heartbeat_timeout");
  refused([](mr_options& o) { o.heartbeat_interval = 1.0 / 0.0; }, "heartbeat_interval");
  refused(
      [](mr_options& o) {
        o.secret = kSecret;
        o.secret_len = 15;
      },
      "16");
  refused([](mr_options& o) { o.listen_host = "no.such.interface.here"; }, "no.such.interface.here");
}

TEST(atomics_and_notifications) {
  Engine owner("owner"), reader("reader");
  alignas(8) uint64_t word = 5;
  Buffer buffer(owner, reader, &word, sizeof word);
  mr_result result;
  mr_op* op = nullptr;
  CHECK_EQ(mr_fetch_add(buffer.remote, 0, 10, 20, &op, nullptr), MR_OK);
  CHECK_EQ(finish(op, &result), MR_OK);
  CHECK_EQ(result.value, 5u);
  CHECK_EQ(mr_compare_and_swap(buffer.remote, 0, 15, 99, 20, &op, nullptr), MR_OK);
  CHECK_EQ(finish(op, &result), MR_OK);
  CHECK_EQ(result.value, 15u);
  CHECK_EQ(word, 99u);
  mr_view all{};
  all.run = sizeof word;
  uint64_t value = 123, got = 0;
  CHECK_EQ(mr_transfer(buffer.remote, MR_WRITE, &value, &all, &all, 20, 0, 1, 777, &op, nullptr), MR_OK);
  CHECK_EQ(mr_region_notification(buffer.region, 20, &got, nullptr), 1);
  CHECK_EQ(got, 777u);
  CHECK_EQ(word, 123u);
  CHECK_EQ(finish(op), MR_OK);
  CHECK_EQ(mr_region_notification(buffer.region, 0, &got, nullptr), 0);
}

TEST(operations_start_again_as_they_were) {
  Engine owner("owner"), reader("reader");
  uint64_t theirs[2] = {1, 2}, ours[2] = {};
  Buffer buffer(owner, reader, theirs, sizeof theirs);
  mr_op* ops[2] = {};
  for (int i = 0; i < 2; ++i)
    CHECK_EQ(mr_transfer_bytes(buffer.remote, MR_READ, &ours[i], i * 8, 8, 20, 0, &ops[i], nullptr), MR_OK);
  for (auto* op : ops) CHECK_EQ(mr_op_wait(op, 20), 1);
  for (uint64_t round = 1; round < 100; ++round) {
    theirs[0] = round;
    theirs[1] = 2 * round;
    int unfinished;  // the first ones are let go of by the loop, which may take a moment
    do unfinished = mr_restart(reader.handle, ops, 2, 20, nullptr);
    while (unfinished == -MR_RESOURCE_EXHAUSTED);
    CHECK_EQ(unfinished, 0);
    CHECK_EQ(ours[0], round);
    CHECK_EQ(ours[1], 2 * round);
  }
  mr_error error{};
  CHECK_EQ(mr_restart(reader.handle, ops, 2, 0.0 / 0.0, &error), -MR_CONFIG);
  mr_op* drop = nullptr;
  CHECK_EQ(mr_region_drop(buffer.region, &drop, nullptr), MR_OK);
  CHECK_EQ(finish(drop), MR_OK);
  CHECK_EQ(mr_restart(reader.handle, ops, 2, 20, &error), 2);
  for (auto* op : ops) {
    CHECK_EQ(mr_op_wait(op, 20), 1);
    CHECK_EQ(mr_op_result(op, nullptr), MR_ACCESS_DENIED);
  }
  mr_op* atomic = nullptr;
  uint64_t word = 0;
  Buffer again(owner, reader, &word, sizeof word);
  CHECK_EQ(mr_fetch_add(again.remote, 0, 1, 20, &atomic, nullptr), MR_OK);
  CHECK_EQ(mr_op_wait(atomic, 20), 1);
  CHECK_EQ(mr_restart(reader.handle, &atomic, 1, 20, &error), -MR_RESOURCE_EXHAUSTED);  // it is never repeated
  mr_op_release(atomic);
  for (auto* op : ops) mr_op_release(op);
}

TEST(what_ends_at_once_needs_no_operation) {
  Engine owner("owner"), reader("reader");
  uint64_t theirs[2] = {1, 2}, ours[2] = {};
  Buffer buffer(owner, reader, theirs, sizeof theirs);
  const auto move = [&](uint32_t verb, uint64_t* local, double timeout, mr_op** op, mr_error* error = nullptr) {
    return mr_move_bytes(buffer.remote, verb, reinterpret_cast<uint64_t>(local), 8, 8, timeout, 0, op, error);
  };
  mr_op* op = nullptr;
  // Connects first, which another thread may have done before this one looks.
  if (const int64_t moved = move(MR_READ, ours, 20, &op); moved == 0)
    CHECK_EQ(finish(op), MR_OK);
  else
    CHECK(moved > 0);
  op = nullptr;
  for (uint64_t round = 1; round < 100; ++round) {
    theirs[1] = round;
    const int64_t moved = move(MR_READ, ours, round % 2 == 0 ? 20 : -1, &op);
    CHECK(moved > 0 && op == nullptr);
    CHECK_EQ(ours[0], round);
    double seconds = -1;
    CHECK_EQ(std::string(mr_moved(moved, &seconds)), "shm-process_vm");
    CHECK(seconds >= 0 && seconds < 20);
  }
  std::thread([&] {  // whose operation is another one
    uint64_t value = 7;
    mr_op* none = nullptr;
    CHECK(move(MR_WRITE, &value, 20, &none) > 0 && none == nullptr);
  })
      .join();
  CHECK_EQ(theirs[1], 7u);
  double seconds = -1;
  CHECK_EQ(std::string(mr_moved(0, &seconds)), "");

  mr_error error{};
  CHECK_EQ(move(MR_READ, ours, 0.0 / 0.0, &op, &error), -MR_CONFIG);
  CHECK_EQ(move(7, ours, 20, &op, &error), -MR_CONFIG);
  CHECK_EQ(move(MR_READ, nullptr, 20, &op, &error), -MR_CONFIG);
  CHECK_EQ(mr_move_bytes(buffer.remote, MR_READ, reinterpret_cast<uint64_t>(ours), 16, 8, 20, 0, &op, &error),
           -MR_OUT_OF_BOUNDS);
  CHECK(op == nullptr);
  mr_op* drop = nullptr;
  CHECK_EQ(mr_region_drop(buffer.region, &drop, nullptr), MR_OK);
  CHECK_EQ(finish(drop), MR_OK);
  for (int i = 0; i < 3; ++i) {
    op = nullptr;
    CHECK_EQ(move(MR_READ, ours, 20, &op), 0);  // a failure has more to tell
    CHECK_EQ(finish(op), MR_ACCESS_DENIED);
  }
}

TEST(drop_refuses_and_wakes_who_waits_for_notifications) {
  Engine owner("owner"), reader("reader");
  char memory[64] = {}, got[64];
  Buffer buffer(owner, reader, memory, sizeof memory);
  CHECK_EQ(transfer(buffer, MR_READ, got, 0, 64), MR_OK);
  std::thread waiter([&] {
    uint64_t value;
    CHECK_EQ(mr_region_notification(buffer.region, 20, &value, nullptr), -MR_ACCESS_DENIED);
  });
  mr_op* op = nullptr;
  CHECK_EQ(mr_remote_drop(buffer.remote, 20, &op, nullptr), MR_OK);
  CHECK_EQ(finish(op), MR_OK);
  waiter.join();
  CHECK_EQ(transfer(buffer, MR_READ, got, 0, 64), MR_ACCESS_DENIED);
  CHECK_EQ(mr_region_dropped(buffer.region), 1);
  CHECK_EQ(mr_region_drop(buffer.region, &op, nullptr), MR_OK);  // again: no error
  CHECK_EQ(finish(op), MR_OK);
}

TEST(names_are_served_without_the_owners_threads) {
  Engine owner("owner"), reader("reader");
  const std::string blob(100'000, 'b');
  mr_error error{};
  CHECK_EQ(mr_publish(owner.handle, "weights", reinterpret_cast<const uint8_t*>(blob.data()), blob.size(), &error),
           MR_OK);
  std::string got(blob.size(), 0);
  uint64_t length = 0;
  CHECK_EQ(mr_lookup(reader.handle, owner.address().c_str(), "weights", 20, reinterpret_cast<uint8_t*>(got.data()),
                     got.size(), &length, &error),
           MR_OK);
  CHECK(got == blob);
  CHECK_EQ(mr_lookup(reader.handle, owner.address().c_str(), "bias", 20, nullptr, 0, &length, &error), MR_CONFIG);
  CHECK(std::string(error.message).find("bias") != std::string::npos);
  CHECK_EQ(mr_lookup(owner.handle, owner.address().c_str(), "weights", 20, nullptr, 0, &length, &error),
           MR_OK);  // our own
  CHECK_EQ(mr_unpublish(owner.handle, "weights", &error), MR_OK);
  CHECK_EQ(mr_unpublish(owner.handle, "weights", &error), MR_CONFIG);
}

TEST(a_handler_gets_what_came_before_it_and_replies) {
  Engine sender("sender"), receiver("receiver");
  Receiver replies(sender);
  Outbox to_receiver(sender, receiver.address());
  const uint8_t data[3] = {7, 8, 9};
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(to_receiver.send({data, data + 3}, 20), MR_OK);
    // The first waits in the inbox until there is a handler; the second finds it.
    while (i == 0 && receiver.counter("streams_up") == 0) std::this_thread::yield();
    mr_message_set_handler(
        receiver.handle,
        [](void* engine, const char*, const uint8_t* bytes, uint64_t length) {
          mr_message_reply(static_cast<mr_engine*>(engine), bytes, length, nullptr);
        },
        receiver.handle);
    CHECK_EQ(replies.take(20), 1);
    CHECK(replies.entries.at(0).data == std::vector<uint8_t>({7, 8, 9}));
  }
  for (const char* name : {"sent_messages", "received_messages"}) {
    CHECK_EQ(sender.counter(name), 2u);
    CHECK_EQ(receiver.counter(name), 2u);
  }
  CHECK_EQ(receiver.counter("received_message_bytes"), 6u);
  CHECK_EQ(mr_message_reply(receiver.handle, data, 3, nullptr), MR_CONFIG);  // not in a handler
}

TEST(closing_ends_everything_that_waits) {
  Engine owner("owner", only_tcp), reader("reader", only_tcp);
  std::vector<uint8_t> theirs(32 << 20), ours(32 << 20);
  Buffer buffer(owner, reader, theirs.data(), theirs.size());
  std::vector<mr_op*> ops(16);
  for (auto& op : ops)
    CHECK_EQ(mr_transfer_bytes(buffer.remote, MR_READ, ours.data(), 0, ours.size(), -1, 0, &op, nullptr), MR_OK);
  mr_op* watch = nullptr;
  CHECK_EQ(mr_watch(reader.handle, owner.address().c_str(), &watch, nullptr), MR_OK);
  reader.close();
  for (auto* op : ops) {
    CHECK_EQ(mr_op_done(op), 1);
    mr_result result;
    const int kind = mr_op_result(op, &result);
    if (kind != MR_OK && kind != MR_CANCELLED) std::fprintf(stderr, "     %s\n", result.message);
    CHECK(kind == MR_OK || kind == MR_CANCELLED);
    mr_op_release(op);
  }
  CHECK_EQ(finish(watch), MR_CANCELLED);
  mr_op* late = nullptr;
  CHECK_EQ(mr_transfer_bytes(buffer.remote, MR_READ, ours.data(), 0, 8, 1, 0, &late, nullptr), MR_CONFIG);
}

TEST(a_peer_that_closes_is_lost) {
  Engine owner("owner", only_tcp), reader("reader", only_tcp);
  std::vector<uint8_t> theirs(64 << 20), ours(64 << 20);
  Buffer buffer(owner, reader, theirs.data(), theirs.size());
  CHECK_EQ(transfer(buffer, MR_READ, ours.data(), 0, 8), MR_OK);
  std::vector<mr_op*> ops(8);
  for (auto& op : ops)
    CHECK_EQ(mr_transfer_bytes(buffer.remote, MR_READ, ours.data(), 0, ours.size(), -1, 0, &op, nullptr), MR_OK);
  owner.close();
  for (auto* op : ops) {
    const int kind = finish(op);
    CHECK(kind == MR_OK || kind == MR_PEER_LOST || kind == MR_ACCESS_DENIED);
  }
  mr_result result;
  CHECK_EQ(transfer(buffer, MR_READ, ours.data(), 0, 8, &result), MR_PEER_LOST);
  CHECK(std::string(result.message).find("owner") != std::string::npos);
}

TEST(two_that_dial_each_other_at_once_are_one_pair) {
  for (int round = 0; round < 20; ++round) {
    Engine a("a"), b("b");
    uint8_t memory[2][64] = {{1}, {2}}, got[2][64] = {};
    Buffer of_a(a, b, memory[0], 64), of_b(b, a, memory[1], 64);
    std::thread other([&] { CHECK_EQ(transfer(of_a, MR_READ, got[0], 0, 64), MR_OK); });
    CHECK_EQ(transfer(of_b, MR_READ, got[1], 0, 64), MR_OK);
    other.join();
    CHECK_EQ(got[0][0], 1u);
    CHECK_EQ(got[1][0], 2u);
    CHECK_EQ(a.counter("peers_known"), 1u);
  }
}

TEST(many_threads_one_pair) {
  Engine owner("owner"), reader("reader");
  std::vector<uint8_t> theirs(1 << 20, 7);
  Buffer buffer(owner, reader, theirs.data(), theirs.size());
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::vector<uint8_t> ours(300'000);
      for (int i = 0; i < 50; ++i) {
        const uint32_t lane = i % 2 == 0 ? uint32_t{MR_LANE_TCP} : uint32_t{MR_LANE_SHM};
        const uint64_t size = static_cast<uint64_t>(1) << (t * 5 + i % 4);
        if (transfer(buffer, MR_READ, ours.data(), 0, size, nullptr, lane) != MR_OK || ours[size - 1] != 7) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(completions_wake_a_poller) {
  Engine owner("owner"), reader("reader");
  std::vector<uint8_t> theirs(1 << 20), ours(100 << 20);
  Buffer buffer(owner, reader, theirs.data(), theirs.size());
  mr_completions* queue = nullptr;
  CHECK_EQ(mr_completions_create(reader.handle, &queue, nullptr), MR_OK);
  std::vector<mr_op*> ops(100);
  for (uint64_t i = 0; i < ops.size(); ++i) {
    CHECK_EQ(mr_transfer_bytes(buffer.remote, MR_READ, ours.data() + (i << 20), 0, i % 2 ? theirs.size() : 8, 20, 0,
                               &ops[i], nullptr),
             MR_OK);
    CHECK_EQ(mr_completions_add(queue, ops[i], i), MR_OK);
  }
  std::vector<bool> seen(ops.size());
  for (size_t count = 0; count < ops.size();) {
    uint64_t tags[8];
    const uint64_t n = mr_completions_take(queue, tags, 8);
    if (n == 0) std::this_thread::yield();
    for (uint64_t i = 0; i < n; ++i) {
      CHECK(!seen[tags[i]]);
      seen[tags[i]] = true;
    }
    count += n;
  }
  for (auto* op : ops) CHECK_EQ(finish(op), MR_OK);
  mr_completions_close(queue);
}

TEST(peers_that_ended_are_forgotten) {
  Engine owner("owner");
  for (int i = 0; i < 300; ++i) {
    Engine reader("reader");
    mr_op* op = nullptr;
    CHECK_EQ(mr_connect(reader.handle, owner.address().c_str(), 20, &op, nullptr), MR_OK);
    CHECK_EQ(finish(op), MR_OK);
  }
  CHECK(owner.counter("peers_known") < 130);
}

TEST(an_idle_pair_is_silent) {
  Engine owner("owner"), reader("reader");
  char memory[8], got[8];
  Buffer buffer(owner, reader, memory, 8);
  CHECK_EQ(transfer(buffer, MR_READ, got, 0, 8, nullptr, MR_LANE_TCP), MR_OK);
  // The heartbeat that the operation began ends after one interval; then nothing wakes either loop.
  const auto wakeups = [&] { return owner.counter("loop_wakeups") + reader.counter("loop_wakeups"); };
  bool silent = false;
  for (int round = 0; !silent && round < 10; ++round) {
    const uint64_t before = wakeups();
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    silent = wakeups() == before;
  }
  CHECK(silent);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
