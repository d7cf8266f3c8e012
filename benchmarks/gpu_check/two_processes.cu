// Two processes on one GPU: each maps the other's memory through an IPC handle, as ranks on one host do.
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cases.h"
#include "kernels.h"
#include "memory.h"

namespace gpu_check {
namespace {

constexpr uint32_t kCount = 100000;
constexpr size_t kData = (kCount * sizeof(float) + 255) / 256 * 256;
constexpr size_t kSignals = (sizeof(mr_gpu_signals) + 255) / 256 * 256;

void write_all(int fd, const void* from, size_t bytes) { must(write(fd, from, bytes) != ssize_t(bytes), "a pipe"); }
void read_all(int fd, void* to, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t got = read(fd, static_cast<char*>(to) + at, bytes - at);
    must(got <= 0, "the other process");
    at += size_t(got);
  }
}

// One of the two ranks. Integers as floats: any order of adding is exact, and the sum is known.
int run_rank(uint32_t rank, int from_other, int to_other, int rounds) {
  Memory mine(Host(kData + kSignals)), out(kData), stop(Host(4));
  cudaIpcMemHandle_t handle, of_other;
  must(cudaIpcGetMemHandle(&handle, mine.at()), "an IPC handle");
  write_all(to_other, &handle, sizeof handle);
  read_all(from_other, &of_other, sizeof of_other);
  void* other = nullptr;
  must(cudaIpcOpenMemHandle(&other, of_other, cudaIpcMemLazyEnablePeerAccess), "opening the other's memory");

  mr_collective_args args = {};
  args.data[rank] = mine.at();
  args.data[1 - rank] = other;
  for (int i = 0; i < 2; ++i)
    args.signals[i] = reinterpret_cast<mr_gpu_signals*>(static_cast<char*>(args.data[i]) + kData);
  args.out = out.at();
  args.stop = stop.at<uint32_t>();
  args.count = kCount;
  args.patience = 200'000'000;
  args.rank = rank;
  args.ranks = 2;
  args.dtype = 5;  // MR_F32
  args.op = MR_GPU_SUM;
  args.blocks = 16;
  int wrong = 0;
  Host host(kCount * sizeof(float));
  auto* floats = reinterpret_cast<float*>(host.data());
  for (int round = 0; round < rounds; ++round) {
    for (uint32_t i = 0; i < kCount; ++i) floats[i] = float((i + round) % 1000 + rank);
    mine.put(host);
    args.kind = round % 2 ? MR_GPU_TWO_SHOT : MR_GPU_ONE_SHOT;
    must(mr_launch_collective(&args, nullptr), "a collective");
    const Host result = out.get();
    const auto* sums = reinterpret_cast<const float*>(result.data());
    bool right = true;
    for (uint32_t i = 0; i < kCount; ++i) right = right && sums[i] == float(2 * ((i + round) % 1000) + 1);
    wrong += !right;
  }
  char done = 0;
  write_all(to_other, &done, 1);  // neither lets go of its memory while the other may use it
  read_all(from_other, &done, 1);
  must(cudaIpcCloseMemHandle(other), "closing the other's memory");
  return wrong;
}

}  // namespace
}  // namespace gpu_check

using namespace gpu_check;

extern "C" int gpu_check_two_processes(int rounds) {
  int to_child[2], to_parent[2];
  must(pipe(to_child) | pipe(to_parent), "making pipes");
  fflush(stdout);
  const pid_t child = fork();
  must(child < 0, "fork");
  if (child == 0) {
    close(to_child[1]);
    close(to_parent[0]);
    _exit(run_rank(1, to_child[0], to_parent[1], rounds) ? 2 : 0);
  }
  close(to_child[0]);
  close(to_parent[1]);
  int wrong = run_rank(0, to_parent[0], to_child[1], rounds);
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0) ++wrong;
  printf("  %-12s %d rounds of all-reduce, %d wrong\n", "IPC", rounds, wrong);
  return wrong;
}
