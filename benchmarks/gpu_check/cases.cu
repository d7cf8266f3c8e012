// Every kernel against the CPU's (csrc/kernels), bit for bit, on random input of many shapes.
#include "cases.h"

#include <string.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>

#include "kernels.h"
#include "kernels/kernels.h"
#include "memory.h"

namespace gpu_check {
namespace {

using mr::kernels::ReduceOp;

std::mt19937_64 random_numbers(20261130);

uint64_t below(uint64_t limit) { return random_numbers() % limit; }

// Any bits: NaN, Inf and denormals are among them.
Host any_bits(size_t bytes) {
  Host host(bytes);
  for (uint8_t& byte : host) byte = uint8_t(random_numbers());
  return host;
}

// Elements of any dtype; a bool is 0 or 1.
Host elements(mr_dtype dtype, size_t count) {
  Host host = any_bits(count * mr::dtype_size(dtype));
  if (dtype == MR_BOOL) {
    for (uint8_t& byte : host) byte &= 1;
  }
  return host;
}

// Numbers of about the same size, as gradients are; now and then a NaN.
Host numbers(mr_dtype dtype, size_t count) {
  std::vector<float> floats(count);
  std::normal_distribution<float> normal;
  for (float& value : floats) value = normal(random_numbers);
  if (count > 0 && below(4) == 0) floats[below(count)] = mr::float_from_bits(mr::kFloatNaN);
  Host host(count * mr::dtype_size(dtype));
  mr::kernels::convert(MR_F32, floats.data(), dtype, host.data(), count);
  return host;
}

// The same bits; of two NaNs only that they are some.
bool agree(mr_dtype dtype, const Host& a, const Host& b, bool any_nan) {
  if (a == b) return true;
  if (!any_nan || a.size() != b.size()) return false;
  const size_t size = mr::dtype_size(dtype), count = a.size() / size;
  std::vector<double> as(count), bs(count);
  mr::kernels::convert(dtype, a.data(), MR_F64, as.data(), count);
  mr::kernels::convert(dtype, b.data(), MR_F64, bs.data(), count);
  for (size_t i = 0; i < count; ++i) {
    const bool nans = as[i] != as[i] && bs[i] != bs[i];
    if (!nans && memcmp(&a[i * size], &b[i * size], size) != 0) return false;
  }
  return true;
}

class Report {
 public:
  void expect(bool right, const std::string& what) {
    ++cases_;
    if (right) return;
    ++wrong_;
    if (wrong_ <= 20) printf("  WRONG: %s\n", what.c_str());
  }
  int finish(const char* kernel) {
    printf("  %-12s %d cases, %d wrong\n", kernel, cases_, wrong_);
    const int wrong = wrong_;
    cases_ = wrong_ = 0;
    return wrong;
  }

 private:
  int cases_ = 0, wrong_ = 0;
};

// --- pack ---

struct Part {
  mr_view view = {};
  mr_dtype dtype = MR_U8;
  uint64_t extent = 0, bytes = 0;
};

Part random_part(mr_dtype dtype) {
  Part part;
  part.dtype = dtype;
  const uint64_t size = mr::dtype_size(dtype);
  part.view.run = size * (1 + below(below(2) ? 9 : 600));
  part.view.ndim = uint32_t(below(4));
  uint64_t step = part.view.run;
  part.bytes = part.view.run;
  part.extent = part.view.run;
  for (uint32_t d = part.view.ndim; d-- > 0;) {
    step += size * below(3) * (below(2) ? 1 : 16);
    part.view.stride[d] = step;
    part.view.count[d] = 1 + below(6);
    part.extent += (part.view.count[d] - 1) * step;
    part.bytes *= part.view.count[d];
    step *= part.view.count[d];
  }
  return part;
}

void pack_case(Report& report, bool cast, mr_dtype packed_dtype) {
  std::vector<Part> parts;
  std::vector<Host> sources;
  std::vector<std::unique_ptr<Memory>> memories;
  std::vector<mr_gpu_part> described;
  mr::kernels::Boxes boxes;
  for (uint64_t i = 0, n = 1 + below(5); i < n; ++i) {
    parts.push_back(random_part(mr_dtype(below(MR_NUM_DTYPES))));
    const Part& part = parts.back();
    sources.push_back(elements(part.dtype, part.extent / mr::dtype_size(part.dtype)));
    memories.push_back(std::make_unique<Memory>(sources.back(), mr::dtype_size(part.dtype) * below(3)));
    mr_gpu_part gpu = {};
    gpu.data = memories.back()->at();
    gpu.run = part.view.run;
    gpu.ndim = part.view.ndim;
    gpu.dtype = part.dtype;
    for (uint32_t d = 0; d < gpu.ndim; ++d) {
      gpu.count[d] = part.view.count[d];
      gpu.stride[d] = int64_t(part.view.stride[d]);
    }
    described.push_back(gpu);
  }
  for (size_t i = 0; i < parts.size(); ++i) boxes.add(sources[i].data(), parts[i].view, parts[i].dtype);

  const size_t bytes = cast ? boxes.elements() * mr::dtype_size(packed_dtype) : boxes.bytes();
  Host want(bytes);
  if (cast) {
    boxes.pack_cast(packed_dtype, want.data(), 0, boxes.elements());
  } else {
    boxes.pack(want.data(), 0, bytes);
  }
  Memory packed(Host(bytes), cast ? mr::dtype_size(packed_dtype) * below(2) : below(2));
  mr_boxes_args lay = {};
  lay.parts = described.data();
  lay.nparts = int64_t(described.size());
  lay.packed = packed.at();
  lay.cast = cast;
  lay.packed_dtype = packed_dtype;
  uint32_t tiles = 0;
  std::vector<mr_gpu_box> laid(size_t(mr_lay_boxes(&lay, &tiles)));
  lay.boxes = laid.data();
  lay.capacity = int64_t(laid.size());
  mr_lay_boxes(&lay, &tiles);
  Memory table(laid.size() * sizeof(mr_gpu_box));
  mr_pack_args args = {};
  args.host_boxes = laid.data();
  args.boxes = table.at<mr_gpu_box>();
  args.nboxes = uint32_t(laid.size());
  args.tiles = tiles;
  args.cast = cast;
  must(mr_launch_pack(&args, nullptr), "pack");
  report.expect(agree(cast ? packed_dtype : MR_U8, packed.get(), want, cast), cast ? "pack with a cast" : "pack");

  // Other content the other way, by the CPU's kernel to a copy: what lies between the runs must not change.
  want = cast ? elements(packed_dtype, boxes.elements()) : any_bits(bytes);
  packed.put(want);
  args.unpack = 1;
  must(mr_launch_pack(&args, nullptr), "unpack");
  if (cast) {
    boxes.unpack_cast(packed_dtype, want.data(), 0, boxes.elements());
  } else {
    boxes.unpack(want.data(), 0, bytes);
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    report.expect(agree(parts[i].dtype, memories[i]->get(), sources[i], cast), cast ? "unpack with a cast" : "unpack");
  }
}

// --- reduce, quantise, checksum ---

void reduce_case(Report& report, mr_dtype dtype, ReduceOp op, size_t count, uint32_t shards, size_t offset) {
  if (!mr::kernels::can_reduce(dtype, op)) return;
  std::vector<Host> hosts;
  std::vector<const void*> pointers;
  std::vector<std::unique_ptr<Memory>> memories;
  mr_reduce_args args = {};
  for (uint32_t i = 0; i < shards; ++i) {
    hosts.push_back(elements(dtype, count));
    memories.push_back(std::make_unique<Memory>(hosts.back(), offset * mr::dtype_size(dtype)));
    args.shard[i] = memories.back()->at();
  }
  for (const Host& host : hosts) pointers.push_back(host.data());
  Memory out(hosts[0].size());
  args.out = out.at();
  args.count = count;
  args.shards = shards;
  args.dtype = dtype;
  args.op = uint32_t(op);
  must(mr_launch_reduce(&args, nullptr), "reduce");
  Host want(hosts[0].size());
  mr::kernels::reduce(dtype, op, pointers.data(), shards, want.data(), count);
  report.expect(out.get() == want, "reduce of dtype " + std::to_string(dtype) + ", op " + std::to_string(int(op)));
}

void quantize_case(Report& report, mr_dtype x_dtype, mr_dtype q_dtype, size_t count, size_t block, size_t offset) {
  const size_t blocks = (count + block - 1) / block;
  const Host x = numbers(x_dtype, count);
  Host error = numbers(MR_F32, count), q(count), scales(blocks * 4);
  Memory on_x(x, offset * mr::dtype_size(x_dtype)), on_error(error, offset * 4), on_q(count), on_scales(blocks * 4);
  mr_quantize_args args = {on_x.at(), on_q.at(), on_scales.at<float>(), on_error.at<float>(), count, block,
                           x_dtype,   q_dtype};
  must(mr_launch_quantize(&args, nullptr), "quantize");
  mr::kernels::quantize(x_dtype, x.data(), q_dtype, q.data(), reinterpret_cast<float*>(scales.data()),
                        reinterpret_cast<float*>(error.data()), count, block);
  const std::string what = "of dtype " + std::to_string(q_dtype) + " in blocks of " + std::to_string(block);
  report.expect(on_q.get() == q && on_scales.get() == scales && on_error.get() == error, "quantize " + what);

  Memory on_out(count * 4);
  mr_dequantize_args back = {};
  back.q[0] = back.q[1] = on_q.at();
  back.scales[0] = back.scales[1] = on_scales.at<float>();
  back.shards = 2;
  back.out = on_out.at();
  back.count = count;
  back.block = block;
  back.q_dtype = q_dtype;
  back.out_dtype = MR_F32;
  must(mr_launch_dequantize(&back, nullptr), "dequantize");
  const void* qs[] = {q.data(), q.data()};
  const auto* factors = reinterpret_cast<const float*>(scales.data());
  const float* all_scales[] = {factors, factors};
  Host sum(count * 4);
  mr::kernels::dequantize_sum(q_dtype, qs, all_scales, 2, reinterpret_cast<float*>(sum.data()), count, block);
  report.expect(on_out.get() == sum, "dequantize " + what);
}

void checksum_case(Report& report, size_t bytes, uint64_t block, size_t offset) {
  const Host data = any_bits(bytes);
  const size_t blocks = (bytes + block - 1) / block;
  std::vector<uint64_t> want(blocks), got(blocks);
  for (size_t i = 0; i < blocks; ++i) {
    const uint64_t size = std::min<uint64_t>(block, bytes - i * block);
    want[i] = mr::kernels::checksum_start(size) + mr::kernels::checksum(data.data() + i * block, size, 0);
  }
  Memory on_data(data, offset), sums(blocks * 8);
  mr_checksum_args args = {on_data.at(), bytes, block, sums.at<uint64_t>()};
  must(mr_launch_checksum(&args, nullptr), "checksum");
  const Host result = sums.get();
  if (blocks > 0) memcpy(got.data(), result.data(), result.size());
  report.expect(got == want, "checksum of " + std::to_string(bytes) + " bytes in blocks of " + std::to_string(block));
}

// --- collectives, all ranks on this GPU, each on a stream of its own ---

void collective_case(Report& report, uint32_t kind, mr_dtype dtype, uint32_t ranks, size_t count) {
  const size_t size = mr::dtype_size(dtype), bytes = count * size;
  const bool scatter = kind == MR_GPU_REDUCE_SCATTER, gather = kind == MR_GPU_ALL_GATHER;
  std::vector<Host> hosts;
  std::vector<std::unique_ptr<Memory>> data, signals, outs;
  Memory stop(Host(4));
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    hosts.push_back(elements(dtype, scatter ? count * ranks : count));
    data.push_back(std::make_unique<Memory>(hosts.back()));
    signals.push_back(std::make_unique<Memory>(Host(sizeof(mr_gpu_signals))));
    outs.push_back(std::make_unique<Memory>(gather ? bytes * ranks : bytes));
  }
  std::vector<cudaStream_t> streams(ranks);
  for (cudaStream_t& stream : streams) must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    mr_collective_args args = {};
    for (uint32_t i = 0; i < ranks; ++i) {
      args.data[i] = data[i]->at();
      args.signals[i] = signals[i]->at<mr_gpu_signals>();
    }
    args.out = outs[rank]->at();
    args.stop = stop.at<uint32_t>();
    args.count = count;
    args.patience = 50'000'000;
    args.kind = kind;
    args.rank = rank;
    args.ranks = ranks;
    args.dtype = dtype;
    args.op = dtype == MR_BOOL ? MR_GPU_MAX : MR_GPU_SUM;
    args.blocks = 4;
    must(mr_launch_collective(&args, streams[rank]), "a collective");
  }
  for (cudaStream_t& stream : streams) {
    must(cudaStreamSynchronize(stream), "a collective");
    must(cudaStreamDestroy(stream), "a stream's end");
  }
  Host want;
  if (gather) {
    for (const Host& host : hosts) want.insert(want.end(), host.begin(), host.end());
  } else {
    std::vector<const void*> pointers;
    for (const Host& host : hosts) pointers.push_back(host.data());
    want.resize(hosts[0].size());
    const ReduceOp op = dtype == MR_BOOL ? ReduceOp::max : ReduceOp::sum;
    mr::kernels::reduce(dtype, op, pointers.data(), ranks, want.data(), want.size() / size);
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const Host mine = scatter ? Host(want.begin() + rank * bytes, want.begin() + (rank + 1) * bytes) : want;
    report.expect(outs[rank]->get() == mine, "collective " + std::to_string(kind) + " of " + std::to_string(ranks) +
                                                 " ranks, dtype " + std::to_string(dtype) + ", " +
                                                 std::to_string(count) + " elements");
  }
}

}  // namespace
}  // namespace gpu_check

using namespace gpu_check;

extern "C" int gpu_check_cases(int rounds, uint32_t most_ranks) {
  Report report;
  int wrong = 0;
  for (int i = 0; i < rounds * 8; ++i) {
    pack_case(report, false, MR_U8);
    pack_case(report, true, mr_dtype(i % MR_NUM_DTYPES));
  }
  wrong += report.finish("pack");
  for (int round = 0; round < rounds; ++round) {
    for (int dtype = 0; dtype < MR_NUM_DTYPES; ++dtype) {
      for (int op = 0; op < 5; ++op) {
        const size_t count = below(round % 2 ? 300 : 5000);
        reduce_case(report, mr_dtype(dtype), ReduceOp(op), count, uint32_t(1 + below(9)), below(4) / 3);
      }
    }
  }
  wrong += report.finish("reduce");
  for (int round = 0; round < rounds; ++round) {
    for (mr_dtype from : {MR_F32, MR_F16, MR_BF16}) {
      for (mr_dtype to : {MR_I8, MR_E4M3FN, MR_E5M2, MR_E4M3FNUZ, MR_E5M2FNUZ}) {
        const size_t blocks[] = {16, 32, 48, 128, 256, 512, 528, 4096, 20000};
        quantize_case(report, from, to, below(9000), blocks[below(9)], below(4) / 3);
      }
    }
  }
  wrong += report.finish("quantize");
  for (int round = 0; round < rounds * 8; ++round) {
    const uint64_t blocks[] = {8, 24, 512, 4096, 8200, 65536, 1 << 20};
    const uint64_t block = blocks[below(7)];
    checksum_case(report, below(std::min<uint64_t>(200000, 300 * block)), block, below(3) == 0 ? below(16) : 0);
  }
  wrong += report.finish("checksum");
  for (int round = 0; round < rounds; ++round) {
    for (uint32_t ranks = 1; ranks <= most_ranks; ranks *= 2) {
      for (uint32_t kind : {MR_GPU_ONE_SHOT, MR_GPU_TWO_SHOT, MR_GPU_REDUCE_SCATTER, MR_GPU_ALL_GATHER}) {
        collective_case(report, kind, mr_dtype(below(MR_NUM_DTYPES)), ranks, below(20000));
      }
    }
  }
  wrong += report.finish("collectives");
  return wrong;
}
