// Messages from engine to engine: their order, the window, the turn of the receivers, the loss of a peer.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "engine_side.h"

namespace {

using Bytes = std::vector<uint8_t>;

Bytes number(uint32_t value, size_t size = sizeof(uint32_t)) {
  Bytes out(size);
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}

uint32_t number_of(const Bytes& data) {
  uint32_t value;
  std::memcpy(&value, data.data(), sizeof value);
  return value;
}

void small_window(mr_options& options) { options.message_window_bytes = 64 << 10; }

struct Stop {
  ~Stop() { mr_stop_free(handle); }
  void set() { mr_stop_set(handle); }
  mr_stop* handle = mr_stop_create();
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

TEST(messages_keep_their_order_and_the_window) {
  Engine sender("sender"), engine("receiver", small_window);
  Receiver receiver(engine);
  constexpr uint32_t kCount = 5000;
  std::thread sending([&] {
    Outbox out(sender, engine.address());
    for (uint32_t i = 0; i < kCount; ++i) CHECK_EQ(out.send(number(i, 1000), 20), MR_OK);
  });
  for (uint32_t next = 0; next < kCount;) {
    CHECK(receiver.take(20) > 0);
    for (const auto& entry : receiver.entries) {
      CHECK_EQ(entry.kind, MR_OK);
      CHECK_EQ(number_of(entry.data), next++);
      CHECK_EQ(entry.data.size(), 1000u);
      CHECK_EQ(entry.sender, sender.address());
    }
  }
  sending.join();
}

TEST(a_message_may_come_in_two_pieces_and_in_any_size) {
  Engine sender("sender"), engine("receiver");
  Receiver receiver(engine);
  Outbox out(sender, engine.address());
  for (size_t size : {0, 1, 4096, 1 << 20, 16 << 20}) {
    Bytes whole(size);
    for (size_t i = 0; i < size; ++i) whole[i] = static_cast<uint8_t>(i * 7 + i / 251);
    const auto cut = static_cast<ptrdiff_t>(size / 3);
    CHECK_EQ(out.send({whole.begin(), whole.begin() + cut}, 20, {whole.begin() + cut, whole.end()}), MR_OK);
    CHECK_EQ(receiver.take(20), 1);
    CHECK(receiver.entries.at(0).data == whole);
  }
  CHECK_EQ(out.send(Bytes((16 << 20) + 1), 20), MR_RESOURCE_EXHAUSTED);
}

TEST(a_sender_waits_for_a_reader_that_does_not_read) {
  Engine sender("sender"), engine("receiver", small_window);
  Receiver receiver(engine);
  Outbox out(sender, engine.address());
  CHECK_EQ(out.send(Bytes(30'000), 5), MR_OK);
  CHECK_EQ(out.send(Bytes(30'000), 5), MR_OK);
  CHECK_EQ(out.send(Bytes(30'000), 0.05), MR_TRANSFER_TIMEOUT);
  CHECK_EQ(out.send(Bytes(30'000), 0), MR_TRANSFER_TIMEOUT);
  CHECK_EQ(out.send(Bytes(33'000), 0.05), MR_RESOURCE_EXHAUSTED);
  CHECK_EQ(receiver.take(5), 2);
  receiver.done();
  CHECK_EQ(out.send(Bytes(30'000), 5), MR_OK);
}

TEST(empty_messages_fill_the_window_too) {
  Engine sender("sender"), engine("receiver", small_window);
  Receiver receiver(engine);
  Outbox out(sender, engine.address());
  int sent = 0;
  CHECK_EQ(out.send({}, 5), MR_OK);
  for (; out.send({}, 0) == MR_OK; ++sent) CHECK(sent < 10'000);
}

TEST(an_engine_sends_to_itself) {
  Engine engine("alone", small_window);
  Receiver receiver(engine);
  Outbox out(engine, engine.address());
  for (uint32_t i = 0; i < 1000; ++i) {
    CHECK_EQ(out.send(number(i), 5, Bytes(1000)), MR_OK);
    CHECK_EQ(receiver.take(5), 1);
    CHECK_EQ(number_of(receiver.entries.at(0).data), i);
    CHECK_EQ(receiver.entries.at(0).sender, engine.address());
  }
}

TEST(receivers_take_turns_and_keep_the_order) {
  Engine sender("sender"), engine("receiver", small_window);
  constexpr uint32_t kCount = 20'000;
  std::atomic<uint32_t> next{0};
  std::vector<std::thread> threads;
  Stop stop;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      Receiver receiver(engine);
      while (next < kCount) {
        CHECK(receiver.take(20, stop.handle, i == 0) >= 0);
        for (const auto& entry : receiver.entries) CHECK_EQ(number_of(entry.data), next.fetch_add(1));
        if (i % 2 == 0) receiver.done();
      }
      receiver.done();
      stop.set();
    });
  Outbox out(sender, engine.address());
  for (uint32_t i = 0; i < kCount; ++i) CHECK_EQ(out.send(number(i, 100), 20), MR_OK);
  for (auto& thread : threads) thread.join();
}

TEST(a_batch_is_its_takers_until_it_is_done_or_put_back) {
  Engine sender("sender"), engine("receiver");
  Receiver receiver(engine);
  Outbox out(sender, engine.address());
  CHECK_EQ(out.send(number(1), 5), MR_OK);
  CHECK_EQ(receiver.take(20), 1);
  CHECK_EQ(out.send(number(2), 5), MR_OK);
  std::atomic<bool> turn{false};
  std::thread other([&] {
    Receiver second(engine);
    CHECK_EQ(second.take(0.05), 0);
    turn = true;
    for (uint32_t wanted : {1, 2}) {
      if (second.entries.empty()) CHECK(second.take(20) > 0);
      CHECK_EQ(number_of(second.entries.at(0).data), wanted);
      second.entries.erase(second.entries.begin());
    }
    second.done();
  });
  while (!turn) std::this_thread::yield();
  receiver.done(true);
  other.join();
  CHECK_EQ(receiver.take(0), 0);
}

TEST(a_stop_ends_a_take_whether_it_leads_or_sleeps) {
  Engine sender("sender"), engine("receiver");
  Stop stops[2];
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (auto& stop : stops)
    threads.emplace_back([&] {
      Receiver receiver(engine);
      CHECK_EQ(receiver.take(-1, stop.handle), 0);
      ++ended;
      CHECK_EQ(receiver.take(-1, stop.handle), 0);  // still set
    });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // they wait by then, or soon: both must do
  for (auto& stop : stops) stop.set();
  for (auto& thread : threads) thread.join();
  CHECK_EQ(ended.load(), 2);
  mr_stop_clear(stops[0].handle);
  CHECK_EQ(mr_stop_is_set(stops[0].handle), 0);
  Receiver receiver(engine);
  Outbox out(sender, engine.address());
  CHECK_EQ(out.send(number(7), 5), MR_OK);
  CHECK_EQ(receiver.take(20, stops[0].handle), 1);
}

// The one in the background is asked to leave the waiting, by takers and by operations, and has its turn after.
TEST(who_receives_in_the_background_gives_way) {
  Engine sender("sender"), engine("receiver");
  Stop stop;
  std::atomic<uint32_t> behind{0};
  std::thread background([&] {
    Receiver receiver(engine);
    while (receiver.take(-1, stop.handle, true) > 0 || mr_stop_is_set(stop.handle) == 0)
      behind += static_cast<uint32_t>(receiver.entries.size());
  });
  Receiver receiver(engine);
  Outbox out(sender, engine.address());
  CHECK_EQ(out.send(number(0), 5), MR_OK);
  while (behind != 1) std::this_thread::yield();
  uint32_t before = 0;
  for (uint32_t i = 1; i <= 200; ++i) {
    CHECK_EQ(out.send(number(i), 5), MR_OK);
    const int count = receiver.take(i % 2 == 0 ? 0.001 : 0.02);
    CHECK(count == 0 || count == 1);
    before += static_cast<uint32_t>(count);
    receiver.done();
    while (before + behind != i + 1) {
      if (receiver.take(0) > 0) ++before;
      receiver.done();
    }
  }
  CHECK(before > 0);
  stop.set();
  background.join();
}

TEST(two_that_flood_each_other_make_progress) {
  Engine left("left", small_window), right("right", small_window);
  constexpr uint32_t kCount = 5'000;
  std::vector<std::thread> threads;
  for (auto [from, to] : {std::pair{&left, &right}, std::pair{&right, &left}}) {
    threads.emplace_back([from, to] {
      Outbox out(*from, to->address());
      for (uint32_t i = 0; i < kCount; ++i) CHECK_EQ(out.send(number(i, 500), 30), MR_OK);
    });
    threads.emplace_back([from] {
      Receiver receiver(*from);
      for (uint32_t got = 0; got < kCount;) {
        CHECK(receiver.take(30, nullptr, true) > 0);
        for (const auto& entry : receiver.entries) CHECK_EQ(number_of(entry.data), got++);
      }
      receiver.done();
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(the_loss_of_a_watched_peer_comes_after_its_messages) {
  Engine engine("receiver");
  Receiver receiver(engine);
  auto lost = std::make_unique<Engine>("lost"), unwatched = std::make_unique<Engine>("unwatched");
  Outbox to_lost(engine, lost->address()), to_unwatched(engine, unwatched->address());
  const std::string address = lost->address();
  for (int i = 0; i < 2; ++i) CHECK_EQ(mr_peer_watch(to_lost.peer, 1, nullptr), MR_OK);
  CHECK_EQ(mr_peer_watch(to_unwatched.peer, 1, nullptr), MR_OK);
  for (int i = 0; i < 2; ++i) CHECK_EQ(mr_peer_unwatch(to_unwatched.peer, nullptr), MR_OK);
  {
    Outbox back(*lost, engine.address()), other(*unwatched, engine.address());
    CHECK_EQ(other.send(number(0), 5), MR_OK);
    CHECK_EQ(receiver.take(5), 1);
    for (uint32_t i = 0; i < 1000; ++i) CHECK_EQ(back.send(number(i), 5), MR_OK);
  }
  unwatched.reset();
  lost.reset();
  std::vector<Receiver::Entry> all;
  while (all.size() <= 1000) {
    CHECK(receiver.take(20) > 0);
    all.insert(all.end(), receiver.entries.begin(), receiver.entries.end());
  }
  for (uint32_t i = 0; i < 1000; ++i) CHECK(all[i].kind == MR_OK && number_of(all[i].data) == i);
  CHECK_EQ(all[1000].kind, MR_PEER_LOST);
  CHECK_EQ(all[1000].sender, address);
  CHECK(std::string(all[1000].data.begin(), all[1000].data.end()).find("lost") == 0);
  CHECK_EQ(receiver.take(0), 0);
  // There is nobody to watch any more.
  CHECK_EQ(mr_peer_watch(to_lost.peer, 1, nullptr), MR_OK);
  CHECK_EQ(receiver.take(20), 1);
  CHECK_EQ(receiver.entries.at(0).kind, MR_PEER_LOST);
  CHECK_EQ(to_lost.send(number(0), 5), MR_PEER_LOST);
}

TEST(a_watch_without_heartbeats_is_silent_and_tells_the_end) {
  Engine engine("receiver");
  Receiver receiver(engine);
  auto other = std::make_unique<Engine>("other");
  Outbox out(engine, other->address());
  CHECK_EQ(out.send(number(0), 5), MR_OK);
  CHECK_EQ(mr_peer_watch(out.peer, 1, nullptr), MR_OK);
  CHECK_EQ(mr_peer_watch(out.peer, 0, nullptr), MR_OK);
  const auto wakeups = [&] { return engine.counter("loop_wakeups") + other->counter("loop_wakeups"); };
  bool silent = false;
  for (int round = 0; !silent && round < 10; ++round) {
    const uint64_t before = wakeups();
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    silent = wakeups() == before;
  }
  CHECK(silent);
  other.reset();
  CHECK_EQ(receiver.take(20), 1);
  CHECK_EQ(receiver.entries.at(0).kind, MR_PEER_LOST);
}

TEST(the_end_of_the_engine_ends_who_waits) {
  for (int round = 0; round < 20; ++round) {
    Engine engine("receiver", small_window), other("other", small_window);
    Outbox out(engine, other.address());
    CHECK_EQ(out.send(Bytes(1000), 5), MR_OK);
    while (round % 2 == 0 && out.send(Bytes(1000), 0) == MR_OK) {
    }
    Receiver first(engine), second(engine);
    std::vector<std::thread> threads;
    threads.emplace_back([&] { CHECK_EQ(first.take(-1), -MR_CONFIG); });
    threads.emplace_back([&] { CHECK_EQ(second.take(-1, nullptr, true), -MR_CONFIG); });
    if (round % 2 == 0) threads.emplace_back([&] { CHECK_EQ(out.send(Bytes(1000), -1), MR_CONFIG); });
    engine.close();
    for (auto& thread : threads) thread.join();
    CHECK_EQ(first.take(0), -MR_CONFIG);
    CHECK_EQ(out.send({}, 0), MR_CONFIG);
    CHECK_EQ(mr_peer_watch(out.peer, 1, nullptr), MR_CONFIG);
    first.done();
  }
}

TEST(who_waits_costs_nothing) {
  Engine engine("receiver");
  Receiver receiver(engine);
  const uint64_t before = engine.counter("loop_wakeups");
  const double begin = now();
  CHECK_EQ(receiver.take(0.2), 0);
  CHECK(now() - begin >= 0.2);
  CHECK_EQ(engine.counter("loop_wakeups"), before);
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
