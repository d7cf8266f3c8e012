#include "fibers.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

namespace mr_emulation {

namespace {

constexpr size_t kStack = 64 << 10;
constexpr int kRoundsOfWaiting = 20000;  // in which only waits ran, before they count as waits for ever
constexpr int kLaunchFailure = 719;      // hipErrorLaunchFailure

enum class State { ready, at_barrier, in_shuffle, yielded, done };

// Stacks are kept for the next fibers; the kernel gives them memory only where they are touched.
std::vector<char*> free_stacks;

char* take_stack() {
  if (!free_stacks.empty()) {
    char* stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
  }
  void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) std::abort();
  return static_cast<char*>(stack);
}

}  // namespace

struct Fiber {
  Block* block;
  dim3 index;
  unsigned linear;
  State state = State::ready;
  bool second = false;  // which of the slots the next shuffle uses
  uint64_t slot[2] = {};
  char* stack = take_stack();
  ucontext_t context = {};

  Fiber(Block* block, unsigned linear) : block(block), linear(linear) {
    const dim3& size = block->size;
    index = dim3(linear % size.x, linear / size.x % size.y, linear / (size.x * size.y));
  }
  ~Fiber() { free_stacks.push_back(stack); }
};

Here here = {};
unsigned wave = 64;

namespace {

ucontext_t scheduler;
Fiber* current = nullptr;
bool holding = false;
double patience = 0;
std::vector<Block> held;
std::string message;
int error = 0;

void suspend(State state) {
  Fiber* fiber = current;
  fiber->state = state;
  swapcontext(&fiber->context, &scheduler);
}

void entry() {
  (*current->block->body)();
  suspend(State::done);
}

void resume(Fiber& fiber) {
  if (fiber.context.uc_stack.ss_sp == nullptr) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, entry, 0);
  }
  current = &fiber;
  here = {fiber.index, fiber.block, fiber.linear % wave};
  swapcontext(&scheduler, &fiber.context);
}

class Turns {
 public:
  Turns(std::vector<Block>& blocks, uint64_t seed) : blocks_(blocks), random_(seed) {
    for (Block& block : blocks_) {
      const unsigned threads = block.size.x * block.size.y * block.size.z;
      for (unsigned i = 0; i < threads; ++i) block.threads.push_back(std::make_unique<Fiber>(&block, i));
    }
  }

  // Until all are done; false if some never can be.
  bool run() {
    int waiting = 0;
    auto moved = std::chrono::steady_clock::now();
    std::vector<size_t> order(blocks_.size());
    std::iota(order.begin(), order.end(), 0);
    for (;;) {
      progress_ = waits_ = false;
      if (blocks_.size() > 1) std::shuffle(order.begin(), order.end(), random_);
      const bool all = blocks_.size() == 1 || ++round_ % 4 == 0;  // in most rounds some blocks do not get a turn
      for (size_t i = 0; i < (all ? order.size() : (order.size() + 1) / 2); ++i) turn(blocks_[order[i]]);
      if (std::all_of(blocks_.begin(), blocks_.end(),
                      [](Block& block) { return count(block, State::done) == size(block); })) {
        return true;
      }
      if (progress_) {
        waiting = 0;
        moved = std::chrono::steady_clock::now();
        continue;
      }
      if (all && !waits_) return false;
      if (patience > 0 && std::chrono::steady_clock::now() - moved < std::chrono::duration<double>(patience)) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      } else if (++waiting > kRoundsOfWaiting) {
        return false;
      }
    }
  }

 private:
  static size_t size(const Block& block) { return block.threads.size(); }
  static size_t count(const Block& block, State state) {
    return size_t(
        std::count_if(block.threads.begin(), block.threads.end(), [&](auto& f) { return f->state == state; }));
  }

  void turn(Block& block) {
    const unsigned threads = unsigned(size(block));
    const unsigned warps = (threads + wave - 1) / wave;
    std::vector<unsigned> order(warps);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random_);
    for (unsigned warp : order) warp_turn(block, warp * wave, std::min(threads, (warp + 1) * wave));
    const size_t at_barrier = count(block, State::at_barrier);
    if (at_barrier > 0 && at_barrier + count(block, State::done) == threads) {
      release(block, 0, threads, State::at_barrier);
      progress_ = true;
    }
  }

  // Runs a warp's threads until each waits for another warp.
  void warp_turn(Block& block, unsigned begin, unsigned end) {
    for (;;) {
      unsigned in_shuffle = 0, elsewhere = 0;
      for (unsigned i = begin; i < end; ++i) {
        Fiber& fiber = *block.threads[i];
        if (fiber.state == State::yielded) {
          fiber.state = State::ready;
          waits_ = true;
          resume(fiber);
          progress_ = progress_ || fiber.state != State::yielded;
        } else if (fiber.state == State::ready) {
          resume(fiber);
          progress_ = true;
        }
        in_shuffle += fiber.state == State::in_shuffle;
        elsewhere += fiber.state != State::in_shuffle && fiber.state != State::done;
      }
      if (in_shuffle == 0 || elsewhere > 0) return;
      release(block, begin, end, State::in_shuffle);
    }
  }

  static void release(Block& block, unsigned begin, unsigned end, State state) {
    for (unsigned i = begin; i < end; ++i) {
      if (block.threads[i]->state == state) block.threads[i]->state = State::ready;
    }
  }

  std::vector<Block>& blocks_;
  std::mt19937_64 random_;
  uint64_t round_ = 0;
  bool progress_ = false, waits_ = false;
};

std::string where_they_are(const std::vector<Block>& blocks) {
  size_t threads[5] = {};
  for (const Block& block : blocks) {
    for (const auto& fiber : block.threads) ++threads[size_t(fiber->state)];
  }
  return "deadlock: " + std::to_string(threads[size_t(State::at_barrier)]) + " threads at a barrier, " +
         std::to_string(threads[size_t(State::in_shuffle)]) + " in a shuffle, " +
         std::to_string(threads[size_t(State::yielded)]) + " waiting for memory, " +
         std::to_string(threads[size_t(State::done)]) + " done";
}

void run_blocks(std::vector<Block> blocks, uint64_t seed) {
  if (!Turns(blocks, seed).run()) {
    message = where_they_are(blocks);
    error = kLaunchFailure;
  }
}

}  // namespace

void launch(dim3 grid, dim3 size, std::function<void()> body) {
  const auto shared_body = std::make_shared<const std::function<void()>>(std::move(body));
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        std::vector<Block> one(1);
        one[0].body = shared_body;
        one[0].index = dim3(x, y, z);
        one[0].size = size;
        one[0].grid = grid;
        if (holding) {
          held.push_back(std::move(one[0]));
        } else {
          run_blocks(std::move(one), x);
          if (error != 0) return;
        }
      }
    }
  }
}

void barrier() { suspend(State::at_barrier); }
void yield_to_others() { suspend(State::yielded); }

uint64_t shuffle(uint64_t value, unsigned from_lane) {
  Fiber& mine = *current;
  const bool second = mine.second;
  mine.second = !second;  // a fast lane may be in its next shuffle before a slow one has read
  mine.slot[second] = value;
  suspend(State::in_shuffle);
  const unsigned from = mine.linear / wave * wave + from_lane % wave;
  return mine.block->threads[from < mine.block->threads.size() ? from : mine.linear]->slot[second];
}

void* shared_bytes(const void* key, size_t bytes) {
  std::unique_ptr<char[]>& place = current->block->shared[key];
  if (place == nullptr) {
    place = std::make_unique<char[]>(bytes);
    std::fill_n(place.get(), bytes, char(0xa5));  // as on a GPU, nobody has cleared it
  }
  return place.get();
}

int last_error() { return std::exchange(error, 0); }

}  // namespace mr_emulation

extern "C" {

void mr_emulation_set_wave(unsigned lanes) { mr_emulation::wave = lanes; }
void mr_emulation_set_patience(double seconds) { mr_emulation::patience = seconds; }
void mr_emulation_hold(void) { mr_emulation::holding = true; }

int mr_emulation_run(uint64_t seed) {
  using namespace mr_emulation;
  holding = false;
  run_blocks(std::exchange(held, {}), seed);
  return last_error();
}

const char* mr_emulation_message(void) { return mr_emulation::message.c_str(); }

}  // extern "C"
