// Kernels beside a device-to-device copy that moves as many bytes (read and written together).
#include <algorithm>

#include "cases.h"
#include "kernels.h"
#include "kernels/float_formats.h"
#include "memory.h"

namespace gpu_check {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr int kRepeats = 20;

// The median of its times, in seconds.
template <typename Launch>
double seconds(Launch launch) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "an event");
  must(cudaEventCreate(&end), "an event");
  std::vector<float> times;
  for (int i = 0; i < kRepeats + 3; ++i) {
    must(cudaEventRecord(begin, nullptr), "an event");
    must(launch(), "a launch");
    must(cudaEventRecord(end, nullptr), "an event");
    must(cudaEventSynchronize(end), "a kernel");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end), "an event");
    if (i >= 3) times.push_back(ms);
  }
  must(cudaEventDestroy(begin), "an event");
  must(cudaEventDestroy(end), "an event");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] / 1000;
}

struct Speeds {
  double goal;
  int below = 0;
  Memory from{1024 * kMiB}, to{1024 * kMiB};

  // `moved`: bytes that the kernel reads and writes.
  template <typename Launch>
  void compare(const char* what, size_t moved, Launch launch) {
    const size_t copied = moved / 2;
    const double copy =
        seconds([&] { return cudaMemcpyAsync(to.at(), from.at(), copied, cudaMemcpyDeviceToDevice, nullptr); });
    const double kernel = seconds(launch);
    const double ratio = copy / kernel;
    printf("  %-34s %7.0f GB/s, copy %7.0f GB/s, ratio %.2f%s\n", what, moved / kernel / 1e9, moved / copy / 1e9, ratio,
           ratio < goal ? "  below the goal" : "");
    below += ratio < goal;
  }
};

void time_pack(Speeds& speeds, const char* what, uint64_t run, uint64_t stride) {
  const uint64_t rows = 512 * kMiB / stride;
  mr_gpu_part part = {};
  part.data = speeds.from.at();
  part.run = run;
  part.ndim = 1;
  part.count[0] = rows;
  part.stride[0] = int64_t(stride);
  mr_boxes_args lay = {};
  lay.parts = &part;
  lay.nparts = 1;
  lay.packed = speeds.to.at();
  uint32_t tiles = 0;
  mr_gpu_box box = {};
  lay.boxes = &box;
  lay.capacity = 1;
  must(mr_lay_boxes(&lay, &tiles) != 1, "laying one box");
  Memory table(sizeof box);
  mr_pack_args args = {};
  args.host_boxes = &box;
  args.boxes = table.at<mr_gpu_box>();
  args.nboxes = 1;
  args.tiles = tiles;
  speeds.compare(what, 2 * rows * run, [&] { return mr_launch_pack(&args, nullptr); });
}

void time_reduce(Speeds& speeds, const char* what, mr_dtype dtype, uint32_t shards) {
  const size_t bytes = 128 * kMiB;
  mr_reduce_args args = {};
  for (uint32_t i = 0; i < shards; ++i) args.shard[i] = speeds.from.at<char>() + i * bytes;
  args.out = speeds.to.at();
  args.count = bytes / mr::dtype_size(dtype);
  args.shards = shards;
  args.dtype = dtype;
  args.op = MR_GPU_SUM;
  speeds.compare(what, (shards + 1) * bytes, [&] { return mr_launch_reduce(&args, nullptr); });
}

void time_quantize(Speeds& speeds, const char* what, mr_dtype from, mr_dtype to, bool with_error) {
  const uint64_t count = 128 * kMiB;
  Memory scales(count / 128 * 4), error(count * 4);
  mr_quantize_args args = {};
  args.x = speeds.from.at();
  args.q = speeds.to.at();
  args.scales = scales.at<float>();
  args.error = with_error ? error.at<float>() : nullptr;
  args.count = count;
  args.block = 128;
  args.x_dtype = from;
  args.q_dtype = to;
  const size_t moved = count * (mr::dtype_size(from) + 1 + (with_error ? 8 : 0)) + count / 128 * 4;
  speeds.compare(what, moved, [&] { return mr_launch_quantize(&args, nullptr); });
}

}  // namespace
}  // namespace gpu_check

using namespace gpu_check;

extern "C" int gpu_check_speed(double goal) {
  Speeds speeds{goal};
  must(cudaMemset(speeds.from.at(), 0, 1024 * kMiB), "clearing memory");
  time_pack(speeds, "pack, runs of 16 KiB", 16384, 32768);
  time_pack(speeds, "pack, runs of 256 B", 256, 512);
  time_reduce(speeds, "reduce, 4 shards of fp32", MR_F32, 4);
  time_reduce(speeds, "reduce, 4 shards of bf16", MR_BF16, 4);
  time_reduce(speeds, "reduce, 4 shards of e4m3fn", MR_E4M3FN, 4);
  time_quantize(speeds, "quantise, fp32 to e4m3fn", MR_F32, MR_E4M3FN, false);
  time_quantize(speeds, "quantise, bf16 to e4m3fn", MR_BF16, MR_E4M3FN, false);
  time_quantize(speeds, "quantise, bf16 to int8, error", MR_BF16, MR_I8, true);
  return speeds.below;
}
