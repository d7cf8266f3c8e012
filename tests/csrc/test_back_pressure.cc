// Two engines that have more to tell each other than one takes at a time.
#include <atomic>
#include <thread>

#include "engine_side.h"

namespace {

constexpr uint64_t kMuch = 400u << 20;  // over what an engine lets wait for a peer that does not read

void large_limits(mr_options& options) {
  options.message_window_bytes = 1u << 30;
  options.max_frame_bytes = 1u << 30;
  options.heartbeat_timeout = 20;
}

// Counts what arrives, on its engine's loop, which it holds until the gate opens.
struct Gate {
  explicit Gate(Engine& engine) {
    mr_message_set_handler(
        engine.handle,
        [](void* self, const char*, const uint8_t*, uint64_t length) { static_cast<Gate*>(self)->arrived(length); },
        this);
  }
  void arrived(uint64_t length) {
    bytes.fetch_add(length);
    bytes.notify_all();
    open.wait(false);
  }
  void release() {
    open.store(true);
    open.notify_all();
  }
  void await(uint64_t least) {
    for (uint64_t seen = bytes.load(); seen < least; seen = bytes.load()) bytes.wait(seen);
  }

  std::atomic<bool> open{false};
  std::atomic<uint64_t> bytes{0};
};

}  // namespace

TEST(two_that_queued_much_for_each_other_go_on_reading) {
  Engine left("left", large_limits), right("right", large_limits);
  Gate at_left(left), at_right(right);
  at_left.release();
  Outbox to_left(right, left.address()), to_right(left, right.address());
  const std::vector<uint8_t> data(4u << 20);
  CHECK_EQ(to_right.send(data, 20), MR_OK);
  at_right.await(data.size());
  // While the right one's loop is held neither reads, and this is queued at both.
  for (uint64_t sent = 0; sent < kMuch; sent += data.size()) {
    CHECK_EQ(to_right.send(data, 20), MR_OK);
    CHECK_EQ(to_left.send(data, 20), MR_OK);
  }
  at_right.release();
  at_left.await(kMuch);
  at_right.await(kMuch);
}

TEST(two_that_ask_each_other_for_much_both_get_it) {
  constexpr size_t kBlob = 30 << 10;
  constexpr int kThreads = 64, kRounds = 20;  // 1.9 MiB of answers at a time, and 1 MiB may wait
  const auto small_frames = [](mr_options& options) { options.max_frame_bytes = 64 << 10; };
  Engine left("left", small_frames), right("right", small_frames);
  const std::vector<uint8_t> much(kBlob, 7);
  for (auto* engine : {&left, &right})
    CHECK_EQ(mr_publish(engine->handle, "much", much.data(), much.size(), nullptr), MR_OK);
  std::atomic<int> right_answers{0};
  const auto fetch = [&](Engine& from, Engine& to) {
    for (int i = 0; i < kRounds; ++i) {
      std::vector<uint8_t> got(kBlob);
      uint64_t length = 0;
      const int kind = mr_lookup(from.handle, to.address().c_str(), "much", 60, got.data(), kBlob, &length, nullptr);
      right_answers += kind == MR_OK && length == kBlob && got == much;
    }
  };
  // The right one's loop is held while all ask for the first time: the answers come in one go.
  Gate gate(right);
  Outbox to_right(left, right.address());
  CHECK_EQ(to_right.send({1}, 20), MR_OK);
  gate.await(1);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    for (auto [from, to] : {std::pair{&left, &right}, std::pair{&right, &left}})
      threads.emplace_back(fetch, std::ref(*from), std::ref(*to));
  while (left.counter("ops_in_flight") < kThreads || right.counter("ops_in_flight") < kThreads)
    std::this_thread::yield();
  gate.release();
  for (auto& thread : threads) thread.join();
  CHECK_EQ(right_answers.load(), 2 * kThreads * kRounds);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
