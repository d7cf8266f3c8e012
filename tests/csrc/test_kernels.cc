// The kernels of the CPU: the same bits with every instruction set, however the work is cut, wherever memory lies.
// What they compute is tested from Python, against torch.
#include "kernels/kernels.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/vectorised.h"
#include "memory/strided_copy.h"

using namespace mr;
using namespace mr::kernels;

namespace {

using Bytes = std::vector<uint8_t>;
constexpr size_t kCounts[] = {0, 1, 15, 33, 255, 4099};
constexpr mr_dtype kQuantized[] = {MR_I8, MR_E4M3FN, MR_E5M2, MR_E4M3FNUZ, MR_E5M2FNUZ};
constexpr mr_dtype kFloats[] = {MR_F32, MR_F16, MR_BF16};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod};

// Random bits: among the floats are many NaNs, Infs and denormals.
Bytes random_bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes out(size);
  for (auto& byte : out) byte = uint8_t(random());
  return out;
}

Bytes random_elements(mr_dtype dtype, size_t count, uint32_t seed) {
  Bytes out = random_bytes(count * dtype_size(dtype), seed);
  if (dtype == MR_BOOL)
    for (auto& byte : out) byte &= 1;
  return out;
}

// Ordinary numbers, for what loses its meaning if every block has a NaN.
Bytes ordinary_floats(mr_dtype dtype, size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (auto& value : values) value = normal(random);
  if (count > 40) values[40] = __builtin_inff();
  Bytes out(count * dtype_size(dtype));
  convert(MR_F32, values.data(), dtype, out.data(), count);
  return out;
}

// Runs `work` with each instruction set that this processor has and compares what it returns.
template <typename Work>
void same_with_every_isa(const Work& work) {
  use_isa(Isa::portable);
  const Bytes expected = work();
  for (const Isa wanted : {Isa::avx2, Isa::avx512}) {
    use_isa(wanted);
    CHECK(isa() <= best_isa());
    CHECK(work() == expected);
  }
  use_isa(best_isa());
}

TEST(reduce_is_the_same_with_every_instruction_set) {
  for (int dtype = 0; dtype < MR_NUM_DTYPES; ++dtype)
    for (const ReduceOp op : kOps)
      for (const size_t count : kCounts) {
        if (!can_reduce(mr_dtype(dtype), op)) continue;
        same_with_every_isa([&] {
          Bytes all;
          for (size_t num_shards = 1; num_shards <= 8; num_shards += count > 1000 ? 3 : 1) {
            std::vector<Bytes> shards;
            std::vector<const void*> pointers;
            for (uint32_t i = 0; i < num_shards; ++i) shards.push_back(random_elements(mr_dtype(dtype), count, i));
            for (const Bytes& shard : shards) pointers.push_back(shard.data());
            Bytes out(count * dtype_size(mr_dtype(dtype)));
            reduce(mr_dtype(dtype), op, pointers.data(), num_shards, out.data(), count);
            all.insert(all.end(), out.begin(), out.end());
          }
          return all;
        });
      }
}

// All pairs of patterns, with a third that takes the first one away again: then only the order tells what is left.
TEST(four_shards_of_fp8_are_added_in_their_order) {
  constexpr size_t kCount = 2 * 65536 + 7;
  const Bytes last = random_bytes(kCount, 4);
  for (const mr_dtype dtype : {MR_E4M3FN, MR_E5M2, MR_E4M3FNUZ, MR_E5M2FNUZ})
    same_with_every_isa([&] {
      std::vector<Bytes> shards(3, Bytes(kCount));
      for (size_t i = 0; i < kCount; ++i) {
        shards[0][i] = uint8_t(i);
        shards[1][i] = uint8_t(i >> 8);
        shards[2][i] = i < 65536 ? uint8_t(i) ^ 0x80 : last[kCount - 1 - i];
      }
      const void* const pointers[] = {shards[0].data(), shards[1].data(), shards[2].data(), last.data()};
      Bytes out(kCount), all;
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
        reduce(dtype, op, pointers, 4, out.data(), kCount);
        all.insert(all.end(), out.begin(), out.end());
      }
      reduce(dtype, ReduceOp::sum, pointers, 4, shards[1].data(), kCount);
      CHECK(std::equal(shards[1].begin(), shards[1].end(), all.begin()));  // in place of one of them
      return all;
    });
}

TEST(a_reduction_may_be_cut_anywhere) {
  constexpr size_t kCount = 3001;
  for (const mr_dtype dtype : {MR_F32, MR_BF16, MR_E4M3FN, MR_E4M3FNUZ, MR_E5M2, MR_I16}) {
    std::vector<Bytes> shards;
    for (uint32_t i = 0; i < 5; ++i) shards.push_back(random_elements(dtype, kCount, i));
    const auto from = [&](size_t begin) {
      std::vector<const void*> pointers;
      for (const Bytes& shard : shards) pointers.push_back(shard.data() + begin * dtype_size(dtype));
      return pointers;
    };
    Bytes whole(kCount * dtype_size(dtype)), cut(whole.size());
    reduce(dtype, ReduceOp::sum, from(0).data(), 5, whole.data(), kCount);
    for (size_t begin = 0, step = 1; begin < kCount; begin += step, step = step * 2 + 1) {
      const size_t count = std::min(step, kCount - begin);
      reduce(dtype, ReduceOp::sum, from(begin).data(), 5, cut.data() + begin * dtype_size(dtype), count);
    }
    CHECK(whole == cut);
  }
}

TEST(a_large_reduction_goes_round_the_caches) {
  constexpr size_t kCount = (kStreamingBytes / 3 / 4) + 77;
  const std::vector<float> one(kCount, 1.0f), two(kCount, 2.0f);
  std::vector<float> out(kCount + 1);
  const void* shards[] = {one.data(), two.data()};
  reduce(MR_F32, ReduceOp::sum, shards, 2, out.data() + 1, kCount);
  CHECK_EQ(size_t(std::count(out.begin() + 1, out.end(), 3.0f)), kCount);
  CHECK_EQ(out[0], 0.0f);
}

TEST(conversions_are_the_same_with_every_instruction_set) {
  for (int from = 0; from < MR_NUM_DTYPES; ++from)
    for (int to = 0; to < MR_NUM_DTYPES; ++to)
      for (const size_t count : kCounts)
        same_with_every_isa([&] {
          const Bytes in = random_elements(mr_dtype(from), count, 7);
          Bytes out(count * dtype_size(mr_dtype(to)));
          convert(mr_dtype(from), in.data(), mr_dtype(to), out.data(), count);
          return out;
        });
}

TEST(quantising_is_the_same_with_every_instruction_set) {
  for (const mr_dtype q_dtype : kQuantized)
    for (const mr_dtype dtype : kFloats)
      for (const size_t count : kCounts)
        for (const size_t block : {16, 128, 100'000})
          same_with_every_isa([&] {
            const size_t blocks = (count + block - 1) / block;
            const Bytes x = ordinary_floats(dtype, count, 3);
            Bytes q(count), out(count * dtype_size(dtype));
            std::vector<float> scales(blocks), error(count, 0.25f), sum(count);
            quantize(dtype, x.data(), q_dtype, q.data(), scales.data(), error.data(), count, block);
            dequantize(q_dtype, q.data(), scales.data(), dtype, out.data(), count, block);
            const void* qs[] = {q.data(), q.data()};
            const float* both[] = {scales.data(), scales.data()};
            dequantize_sum(q_dtype, qs, both, 2, sum.data(), count, block);
            for (const std::vector<float>* floats : {&scales, &error, &sum}) {
              const auto* bytes = reinterpret_cast<const uint8_t*>(floats->data());
              out.insert(out.end(), bytes, bytes + floats->size() * 4);
            }
            out.insert(out.end(), q.begin(), q.end());
            return out;
          });
}

TEST(checksums_are_sums_of_their_pieces) {
  const Bytes data = random_bytes(5003, 1);
  same_with_every_isa([&] {
    const uint64_t whole = checksum(data.data(), data.size(), 0);
    uint64_t pieces = 0;
    for (uint64_t at = 0, size = 8; at < data.size(); at += size, size += 24) {
      pieces += checksum(data.data() + at, std::min(size, data.size() - at), at / 8);
    }
    CHECK_EQ(whole, pieces);
    Bytes out(8);
    std::memcpy(out.data(), &whole, 8);
    return out;
  });
}

TEST(checksums_on_the_way_are_those_of_what_is_stored) {
  const Bytes data = random_bytes(20'011, 1);
  same_with_every_isa([&] {
    Bytes room(data.size() + 64), out(8);
    uint64_t all = 0;
    for (const uint64_t shift : {0, 8, 3})
      for (const uint64_t size : {uint64_t{0}, uint64_t{5}, uint64_t{72}, data.size()})
        for (const auto copy : {copy_with_checksum, stream_with_checksum}) {
          std::fill(room.begin(), room.end(), uint8_t{0});
          const uint64_t sum = copy(room.data() + shift, data.data(), size, 3);
          finish_streaming();
          CHECK_EQ(sum, checksum(data.data(), size, 3));
          CHECK(std::equal(data.begin(), data.begin() + ptrdiff_t(size), room.begin() + ptrdiff_t(shift)));
          CHECK_EQ(int{room[shift + size]}, 0);
          all += sum;
        }
    std::memcpy(out.data(), &all, 8);
    return out;
  });
}

mr_view view_of(uint64_t run, std::vector<std::pair<uint64_t, uint64_t>> dims) {
  mr_view raw{};
  raw.run = run;
  raw.ndim = uint32_t(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) raw.count[i] = dims[i].first, raw.stride[i] = dims[i].second;
  return raw;
}

TEST(boxes_may_be_cut_anywhere) {
  Bytes memory = random_bytes(200'000, 5);
  const std::vector<mr_view> views = {
      view_of(4, {{70, 4}, {50, 400}}),              // transposed
      view_of(2, {{3, 20'000}, {45, 2}, {33, 90}}),  // batches of it
      view_of(1, {{5, 7000}, {9, 3}, {11, 30}, {13, 500}}),
      view_of(4, {{500, 8}}),
      view_of(3, {{40, 700}, {60, 5}}),
      view_of(300, {{90, 900}}),
      view_of(1000, {}),
      view_of(8, {{6, 0}, {10, 16}}),  // expanded
  };
  Boxes boxes;
  Bytes expected;
  for (const mr_view& raw : views) {
    boxes.add(memory.data(), raw, MR_U8);
    const View view = View::from(raw);
    for (Cursor cursor(view); cursor.left() > 0;) expected.push_back(memory[cursor.next(1).offset]);
  }
  CHECK_EQ(boxes.bytes(), expected.size());
  std::mt19937 random(9);
  for (int round = 0; round < 40; ++round) {
    Bytes packed(expected.size());
    for (uint64_t begin = 0; begin < packed.size();) {
      const uint64_t end = std::min<uint64_t>(packed.size(), begin + 1 + random() % (round < 20 ? 300 : 30'000));
      boxes.pack(packed.data(), begin, end);
      begin = end;
    }
    CHECK(packed == expected);
  }

  // Back to where it came from, but for the box that has elements twice.
  Bytes other(memory.size());
  Boxes back;
  for (const mr_view& raw : views) back.add(other.data(), raw, MR_U8);
  for (uint64_t begin = 0; begin < expected.size();) {
    const uint64_t end = std::min<uint64_t>(expected.size(), begin + 1 + random() % 9000);
    back.unpack(expected.data(), begin, end);
    begin = end;
  }
  Bytes again(expected.size());
  back.pack(again.data(), 0, again.size());
  CHECK(again == expected);
  for (size_t i = 0; i < other.size(); ++i) CHECK(other[i] == 0 || other[i] == memory[i]);
}

}  // namespace

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
