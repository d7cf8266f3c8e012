#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "../memory/strided_copy.h"
#include "elements.h"
#include "floats.h"
#include "fp8.h"
#include "kernels.h"
#include "vectorised.h"

namespace mr::kernels {
namespace {

// Each op keeps the first of two equals, and a NaN once it has one.
struct Sum {
  template <typename T>
  MR_HOST_DEVICE static T combine(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return T(uint64_t(a) + uint64_t(b));
    else
      return a + b;
  }
};

struct Product {
  template <typename T>
  MR_HOST_DEVICE static T combine(T a, T b) {
    using Unsigned = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    if constexpr (std::is_integral_v<T>)
      return T(Unsigned(a) * Unsigned(b));
    else
      return a * b;
  }
};

struct Min {
  template <typename T>
  MR_HOST_DEVICE static T combine(T a, T b) {
    return b < a || b != b ? b : a;
  }
};

struct Max {
  template <typename T>
  MR_HOST_DEVICE static T combine(T a, T b) {
    return b > a || b != b ? b : a;
  }
};

// Several shards at a time: their streams are read side by side, as memory likes it.
template <typename Op, typename T>
struct FirstTwo {
  MR_HOST_DEVICE static void run(T* __restrict partial, const T* a, const T* b, size_t count) {
    for (size_t i = 0; i < count; ++i) partial[i] = Op::combine(a[i], b[i]);
  }
};

template <typename Op, typename T>
struct FirstFour {
  MR_HOST_DEVICE static void run(T* __restrict partial, const T* a, const T* b, const T* c, const T* d, size_t count) {
    for (size_t i = 0; i < count; ++i) partial[i] = Op::combine(Op::combine(Op::combine(a[i], b[i]), c[i]), d[i]);
  }
};

template <typename Op, typename T>
struct NextOne {
  MR_HOST_DEVICE static void run(T* __restrict partial, const T* a, size_t count) {
    for (size_t i = 0; i < count; ++i) partial[i] = Op::combine(partial[i], a[i]);
  }
};

template <typename Op, typename T>
struct NextThree {
  MR_HOST_DEVICE static void run(T* __restrict partial, const T* a, const T* b, const T* c, size_t count) {
    for (size_t i = 0; i < count; ++i) partial[i] = Op::combine(Op::combine(Op::combine(partial[i], a[i]), b[i]), c[i]);
  }
};

template <typename T>
struct Divide {
  MR_HOST_DEVICE static void run(T* partial, T divisor, size_t count) {
    for (size_t i = 0; i < count; ++i) partial[i] /= divisor;
  }
};

// Processors differ in which of two NaNs comes out of a sum.
template <typename T>
struct OneNaN {
  MR_HOST_DEVICE static void run(T* partial, size_t count) {
    const T nan = T(__builtin_nanf(""));
    for (size_t i = 0; i < count; ++i) partial[i] = partial[i] != partial[i] ? nan : partial[i];
  }
};

// The results of one piece are worked out in the innermost cache, in the type of arithmetic, and then stored.
template <typename Value, typename Op>
class Reduction {
 public:
  Reduction(mr_dtype dtype, const void* const* shards, size_t num_shards, void* out, size_t count)
      : shards_(shards),
        num_shards_(num_shards),
        out_(static_cast<uint8_t*>(out)),
        dtype_(dtype),
        is_value_(dtype_size(dtype) == sizeof(Value)),
        sums_stored_(std::is_same_v<Op, Sum> && std::is_same_v<Value, float> && num_shards >= 4 &&
                     dtype_size(dtype) < sizeof(Value)) {
    // Those that do not stay in the caches anyway need not pass through them, unless they are there: as a shard.
    streaming_ = count * dtype_size(dtype) * (num_shards + 1) >= kStreamingBytes &&
                 std::find(shards, shards + num_shards, out) == shards + num_shards;
  }

  // Of all `count` elements, as many from the first on as the processor at hand can do without a stop in memory.
  size_t at_once(size_t count, size_t divisor) {
    if constexpr (std::is_same_v<Value, float> && std::is_same_v<Op, Sum>) {
      const bool is_power = divisor == 0 || std::has_single_bit(divisor);  // whose fraction is as exact as a division
      if (num_shards_ != 4 || dtype_size(dtype_) != 1 || !is_power) return 0;
      const Fp8Shards shards = {stored(0, 0), stored(1, 0), stored(2, 0), stored(3, 0)};
      const float factor = divisor == 0 ? 1.0f : 1.0f / float(divisor);
      size_t done = 0;
      with_fp8(dtype_,
               [&](auto format) { done = Fp8Runs<decltype(format)>::sum_of_four(shards, factor, out_, count); });
      return done;
    }
    return 0;
  }

  // divisor: of an average; 0 else.
  void piece(size_t begin, size_t count, size_t divisor) {
    size_t shard = 0;
    const auto next = [&](size_t slot) { return values(shard++, slot, begin, count); };
    if (sums_four(begin, count)) {
      shard = 4;
    } else if (num_shards_ >= 4) {
      const Value *a = next(0), *b = next(1), *c = next(2), *d = next(3);
      run_vectorised<FirstFour<Op, Value>>(partial_, a, b, c, d, count);
    } else if (num_shards_ >= 2) {
      const Value *a = next(0), *b = next(1);
      run_vectorised<FirstTwo<Op, Value>>(partial_, a, b, count);
    } else {
      std::memcpy(partial_, next(0), count * sizeof(Value));
    }
    while (num_shards_ - shard >= 3) {
      const Value *a = next(0), *b = next(1), *c = next(2);
      run_vectorised<NextThree<Op, Value>>(partial_, a, b, c, count);
    }
    while (shard < num_shards_) {
      const Value* a = next(0);
      run_vectorised<NextOne<Op, Value>>(partial_, a, count);
    }
    if constexpr (std::is_floating_point_v<Value>)
      if (divisor != 0) run_vectorised<Divide<Value>>(partial_, Value(divisor), count);
    store(begin, count);
  }

  // Elements at a time. Few where shards are converted one after the other: memory likes streams that go on side by
  // side.
  size_t piece_size() const { return is_value_ ? kPiece : kConvertedBytes / dtype_size(dtype_); }

 private:
  const Value* values(size_t shard, size_t slot, size_t begin, size_t count) {
    const uint8_t* const at = stored(shard, begin);
    if (is_value_) return reinterpret_cast<const Value*>(at);
    read_ahead(at, count);
    if constexpr (std::is_same_v<Value, float>) to_floats(dtype_, at, widened_[slot], count);
    return widened_[slot];
  }

  // The first four shards, where the processor at hand can sum what lies in memory.
  bool sums_four(size_t begin, size_t count) {
    if (!sums_stored_) return false;
    const void* const shards[4] = {stored(0, begin), stored(1, begin), stored(2, begin), stored(3, begin)};
    if constexpr (std::is_same_v<Value, float>)
      if (sums_of_four(dtype_, shards, partial_, count) != count) return false;
    for (const void* shard : shards) read_ahead(static_cast<const uint8_t*>(shard), count);
    return true;
  }

  const uint8_t* stored(size_t shard, size_t begin) const {
    return static_cast<const uint8_t*>(shards_[shard]) + begin * dtype_size(dtype_);
  }

  // A piece of bytes is so short that the processor, which sees the streams take turns, does not read ahead by itself.
  void read_ahead(const uint8_t* at, size_t count) const {
    if (dtype_size(dtype_) != 1) return;
    for (size_t line = 0; line < count; line += 64) __builtin_prefetch(at + kAhead + line);
  }

  void store(size_t begin, size_t count) {
    uint8_t* const to = out_ + begin * dtype_size(dtype_);
    if constexpr (std::is_same_v<Value, float>)
      if (!is_value_) return from_floats(dtype_, partial_, to, count);
    if constexpr (std::is_floating_point_v<Value>) run_vectorised<OneNaN<Value>>(partial_, count);
    const auto* from = reinterpret_cast<const uint8_t*>(partial_);
    if (streaming_)
      streaming_copy(to, from, count * sizeof(Value));
    else
      std::memcpy(to, from, count * sizeof(Value));
  }

  static constexpr size_t kAhead = 1024;  // bytes
  static constexpr size_t kPiece = 2048 / sizeof(Value), kConvertedBytes = 512;

  const void* const* shards_;
  const size_t num_shards_;
  uint8_t* const out_;
  const mr_dtype dtype_;
  const bool is_value_, sums_stored_;
  bool streaming_;
  alignas(64) Value partial_[kPiece];
  alignas(64) Value widened_[4][std::is_same_v<Value, float> ? kConvertedBytes : 1];
};

// use(Value()) with the type that a dtype's arithmetic is done in. A bool is a byte, 0 or 1.
template <typename Use>
void with_value(mr_dtype dtype, const Use& use) {
  with_element(dtype, [&](auto element) {
    using Value = typename decltype(element)::Value;
    use(std::conditional_t<std::is_same_v<Value, bool>, uint8_t, Value>());
  });
}

template <typename Op>
void reduce_with(mr_dtype dtype, const void* const* shards, size_t num_shards, void* out, size_t count,
                 size_t divisor) {
  with_value(dtype, [&](auto value) {
    using Value = decltype(value);
    Reduction<Value, Op> reduction(dtype, shards, num_shards, out, count);
    const size_t most = reduction.piece_size();
    for (size_t begin = reduction.at_once(count, divisor); begin < count; begin += most)
      reduction.piece(begin, std::min(most, count - begin), divisor);
    finish_streaming();
  });
}

}  // namespace

void reduce(mr_dtype dtype, ReduceOp op, const void* const* shards, size_t num_shards, void* out, size_t count,
            size_t divisor) {
  switch (op) {
    case ReduceOp::sum:
      return reduce_with<Sum>(dtype, shards, num_shards, out, count, 0);
    case ReduceOp::avg:
      return reduce_with<Sum>(dtype, shards, num_shards, out, count, divisor != 0 ? divisor : num_shards);
    case ReduceOp::min:
      return reduce_with<Min>(dtype, shards, num_shards, out, count, 0);
    case ReduceOp::max:
      return reduce_with<Max>(dtype, shards, num_shards, out, count, 0);
    case ReduceOp::prod:
      return reduce_with<Product>(dtype, shards, num_shards, out, count, 0);
  }
}

}  // namespace mr::kernels
