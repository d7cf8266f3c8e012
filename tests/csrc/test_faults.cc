// Faults put on a connection on purpose, over a Unix socket and over TCP with TLS: what gets through is whole, what
// does not ends with a failure, and afterwards a new connection works.
#include <chrono>
#include <memory>
#include <thread>

#include "engine_side.h"

namespace {

// Far from what a busy host takes for anything here: only what is cut for longer is lost.
void over_unix(mr_options& options) {
  options.heartbeat_interval = 0.05;
  options.heartbeat_timeout = 5;
  options.connect_timeout = 10;
}

void over_tcp(mr_options& options) {
  over_unix(options);
  options.same_host_unix = 0;
  options.lanes = "tcp";
  options.bulk_tls = 1;
}

using Change = void (*)(mr_options&);
constexpr Change kWays[] = {over_unix, over_tcp};

template <Change way>
void impatient(mr_options& options) {
  way(options);
  options.heartbeat_timeout = 0.5;
  options.connect_timeout = 1;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Two engines that have a connection, and memory of one that the other reads.
struct Pair {
  explicit Pair(Change change, size_t size = 4096) : owner("owner", change), reader("reader", change), memory(size) {
    for (size_t i = 0; i < size; ++i) memory[i] = static_cast<uint8_t>(i * 7 + i / 251);
    mr_error error{};
    CHECK_EQ(mr_region_create(owner.handle, memory.data(), size, MR_READ, &region, &error), MR_OK);
    std::vector<uint8_t> descriptor(mr_region_descriptor(region, nullptr, 0));
    mr_region_descriptor(region, descriptor.data(), descriptor.size());
    CHECK_EQ(mr_remote_open(reader.handle, descriptor.data(), descriptor.size(), &remote, &error), MR_OK);
    CHECK_EQ(read(), MR_OK);
  }
  ~Pair() {
    mr_remote_close(remote);
    mr_region_close(region);
  }

  // Kind of its end; where it succeeds, every byte is right.
  int read(double timeout = 20) {
    std::vector<uint8_t> got(memory.size());
    mr_op* op = nullptr;
    if (const int kind = mr_transfer_bytes(remote, MR_READ, got.data(), 0, got.size(), timeout, 0, &op, nullptr);
        kind != MR_OK)
      return kind;
    CHECK_EQ(mr_op_wait(op, 30), 1);
    const int kind = mr_op_result(op, nullptr);
    mr_op_release(op);
    if (kind == MR_OK) CHECK(got == memory);
    return kind;
  }
  int fault(Engine& at, Engine& other, uint32_t kind, double seconds = 0, double amount = 0) {
    return mr_peer_fault(at.handle, other.address().c_str(), kind, seconds, amount, nullptr);
  }
  // An end of the reader's watch of the owner.
  int watch() {
    mr_op* op = nullptr;
    CHECK_EQ(mr_watch(reader.handle, owner.address().c_str(), &op, nullptr), MR_OK);
    CHECK_EQ(mr_op_wait(op, 20), 1);
    const int kind = mr_op_result(op, nullptr);
    mr_op_release(op);
    return kind;
  }

  Engine owner, reader;
  std::vector<uint8_t> memory;
  mr_region* region = nullptr;
  mr_remote* remote = nullptr;
};

}  // namespace

TEST(a_broken_connection_is_made_anew) {
  for (const Change way : kWays) {
    Pair pair(way);
    for (int round = 0; round < 3; ++round) {
      std::thread watcher([&] { CHECK_EQ(pair.watch(), MR_PEER_LOST); });
      while (pair.reader.counter("ops_in_flight") == 0) std::this_thread::yield();
      CHECK_EQ(pair.fault(pair.reader, pair.owner, MR_FAULT_BREAK), MR_OK);
      watcher.join();
      int kind = pair.read();  // the other side may not have seen the end yet
      if (kind == MR_PEER_LOST) kind = pair.read();
      CHECK_EQ(kind, MR_OK);
    }
  }
}

TEST(a_short_cut_only_delays) {
  for (const Change way : kWays) {
    Pair pair(way);
    Receiver inbox(pair.owner);
    Outbox outbox(pair.reader, pair.owner.address());
    CHECK_EQ(outbox.send({0}, 20), MR_OK);
    CHECK_EQ(inbox.take(20), 1);
    const auto begin = std::chrono::steady_clock::now();
    CHECK_EQ(pair.fault(pair.reader, pair.owner, MR_FAULT_CUT, 0.25), MR_OK);
    for (uint8_t i = 1; i <= 100; ++i) CHECK_EQ(outbox.send({i}, 20), MR_OK);
    size_t got = 0;
    while (got < 100) {
      CHECK(inbox.take(20) > 0);
      for (const auto& entry : inbox.entries) {
        CHECK_EQ(entry.kind, MR_OK);
        CHECK_EQ(entry.data.at(0), static_cast<uint8_t>(++got));  // in order, each once
      }
    }
    CHECK(seconds_since(begin) >= 0.25);
    CHECK_EQ(pair.read(), MR_OK);
  }
}

TEST(a_long_cut_is_a_loss_and_heals) {
  for (const Change way : {impatient<over_unix>, impatient<over_tcp>}) {
    Pair pair(way);
    const auto begin = std::chrono::steady_clock::now();
    CHECK_EQ(pair.fault(pair.reader, pair.owner, MR_FAULT_CUT, 2.0), MR_OK);
    CHECK_EQ(pair.watch(), MR_PEER_LOST);
    CHECK(seconds_since(begin) >= 0.2);
    CHECK_EQ(pair.fault(pair.reader, pair.owner, MR_FAULT_BREAK), MR_PEER_LOST);  // there is no connection now
    mr_op* op = nullptr;                                                          // nor can one be made
    CHECK_EQ(mr_connect(pair.reader.handle, pair.owner.address().c_str(), 0.2, &op, nullptr), MR_OK);
    CHECK_EQ(mr_op_wait(op, 20), 1);
    if (seconds_since(begin) < 2.0)  // the cut is not over, which it may be where others use the processors
      CHECK(mr_op_result(op, nullptr) == MR_TRANSFER_TIMEOUT || mr_op_result(op, nullptr) == MR_PEER_LOST);
    mr_op_release(op);
    int kind = MR_PEER_LOST;
    for (int i = 0; i < 10 && kind == MR_PEER_LOST; ++i) kind = pair.read();
    CHECK_EQ(kind, MR_OK);
    CHECK(seconds_since(begin) >= 1.9);
  }
}

TEST(a_slow_connection_is_slow_and_right) {
  Pair pair(over_tcp, 1 << 20);
  CHECK_EQ(pair.fault(pair.reader, pair.owner, MR_FAULT_SLOW, 20, 2 << 20), MR_OK);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 3; ++i) CHECK_EQ(pair.read(), MR_OK);
  CHECK(seconds_since(begin) >= 0.2);  // three times a megabyte, over up to 4 sockets that wait after what they read
}

TEST(a_damaged_frame_ends_the_connection_and_nothing_wrong_is_delivered) {
  for (const Change way : kWays)
    for (const double damage : {0.0, 1.0, 2.0}) {
      Pair pair(way);
      Receiver inbox(pair.owner);
      Outbox outbox(pair.reader, pair.owner.address());
      CHECK_EQ(outbox.send({1}, 20), MR_OK);
      CHECK_EQ(inbox.take(20), 1);
      CHECK_EQ(pair.fault(pair.owner, pair.reader, MR_FAULT_CORRUPT, 0, damage), MR_OK);
      CHECK_EQ(outbox.send({2}, 20), MR_OK);  // on its way, and lost
      int kind = pair.read();                 // asked before the other side has closed
      while (kind == MR_PEER_LOST) kind = pair.read();
      CHECK_EQ(kind, MR_OK);
      int count = 0;  // what is sent before the end is seen is lost too
      for (int i = 0; i < 100 && count == 0; ++i) {
        outbox.send({3}, 20);
        count = inbox.take(0.1);
      }
      CHECK(count > 0);
      for (const auto& entry : inbox.entries) CHECK_EQ(entry.data.at(0), 3);
    }
}

TEST(what_is_no_fault_is_refused) {
  Pair pair(over_unix);
  for (const uint32_t kind : {0u, 5u}) CHECK_EQ(pair.fault(pair.reader, pair.owner, kind), MR_CONFIG);
  CHECK_EQ(pair.fault(pair.reader, pair.owner, MR_FAULT_CUT, -1), MR_CONFIG);
  CHECK_EQ(pair.fault(pair.reader, pair.owner, MR_FAULT_SLOW, 1, 0), MR_CONFIG);
  CHECK_EQ(pair.fault(pair.reader, pair.reader, MR_FAULT_BREAK), MR_PEER_LOST);  // not with itself
  Engine other("other");
  CHECK_EQ(pair.fault(pair.reader, other, MR_FAULT_BREAK), MR_PEER_LOST);
  CHECK_EQ(pair.read(), MR_OK);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
