// GPU kernels on a CPU: each device thread is a fiber, so barriers, shuffles and waits mean what they mean on a GPU.
//
// A launch runs at once, one block of threads after the other. Between hold() and run() launches are kept, and then all
// their blocks live together, as on several GPUs: blocks and warps take turns in a random order that a seed fixes.
// Fibers that can never go on (a barrier or shuffle that some threads left out, a wait for what nobody will write) end
// the launch with a message. One operating system thread does everything.
//
// Kernels that wait for those of other processes (their memory shared, their fibers not) need patience: only after that
// many seconds in which nothing moved does a wait count as one for ever.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace mr_emulation {

struct Fiber;

// One block of threads and its shared memory.
struct Block {
  std::shared_ptr<const std::function<void()>> body;
  dim3 index, size, grid;
  std::vector<std::unique_ptr<Fiber>> threads;
  std::map<const void*, std::unique_ptr<char[]>> shared;
};

struct Here {  // of the thread that runs now
  dim3 thread;
  const Block* block;
  unsigned lane;
};
extern Here here;
extern unsigned wave;  // lanes in a warp

void launch(dim3 grid, dim3 block, std::function<void()> body);
void barrier();
void yield_to_others();
uint64_t shuffle(uint64_t value, unsigned from_lane);
void* shared_bytes(const void* key, size_t bytes);
int last_error();  // and forgets it

template <typename T>
T* shared(const void* key, size_t count) {
  return static_cast<T*>(shared_bytes(key, count * sizeof(T)));
}

}  // namespace mr_emulation

#pragma GCC visibility push(default)
extern "C" {
/* cffi: begin */
void mr_emulation_set_wave(unsigned lanes);
void mr_emulation_hold(void);
void mr_emulation_set_patience(double seconds);
int mr_emulation_run(uint64_t seed);    /* 0, or the runtime's error number */
const char* mr_emulation_message(void); /* what went wrong last */
/* cffi: end */
}
#pragma GCC visibility pop
