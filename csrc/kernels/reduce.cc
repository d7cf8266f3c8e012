#include <algorithm>
#include <type_traits>

#include "elements.h"
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

struct Job {
  const void* const* shards;
  size_t num_shards;
  void* out;
  size_t count;
  bool average;
};

template <typename Value>
MR_HOST_DEVICE Value canonical(Value value) {
  if constexpr (std::is_floating_point_v<Value>) return value != value ? Value(__builtin_nanf("")) : value;
  return value;
}

template <typename Element, typename Op>
struct ReduceLoop {
  using Storage = typename Element::Storage;
  using Value = typename Element::Value;

  MR_HOST_DEVICE static void run(const Job& job) {
    constexpr size_t kPiece = 8192 / sizeof(Value);  // partial results stay in the innermost cache
    alignas(64) Value partial[kPiece];
    for (size_t begin = 0; begin < job.count; begin += kPiece) {
      const size_t size = job.count - begin < kPiece ? job.count - begin : kPiece;
      const Storage* first = static_cast<const Storage*>(job.shards[0]) + begin;
      for (size_t i = 0; i < size; ++i) partial[i] = Element::load(first[i]);
      for (size_t shard = 1; shard < job.num_shards; ++shard) {
        const Storage* next = static_cast<const Storage*>(job.shards[shard]) + begin;
        for (size_t i = 0; i < size; ++i) partial[i] = Op::combine(partial[i], Element::load(next[i]));
      }
      if (job.average) {
        if constexpr (std::is_floating_point_v<Value>) {
          const Value divisor = Value(job.num_shards);
          for (size_t i = 0; i < size; ++i) partial[i] /= divisor;
        }
      }
      Storage* out = static_cast<Storage*>(job.out) + begin;
      for (size_t i = 0; i < size; ++i) out[i] = Element::store(canonical(partial[i]));
    }
  }
};

template <typename Op>
void reduce_with(mr_dtype dtype, const Job& job) {
  with_element(dtype, [&](auto element) { run_vectorised<ReduceLoop<decltype(element), Op>, const Job&>(job); });
}

}  // namespace

bool can_reduce(mr_dtype dtype, ReduceOp op) {
  const bool is_floating = dtype >= MR_F32 && dtype <= MR_E5M2FNUZ;
  if (op == ReduceOp::avg) return is_floating;
  return dtype != MR_BOOL || op == ReduceOp::min || op == ReduceOp::max;
}

void reduce(mr_dtype dtype, ReduceOp op, const void* const* shards, size_t num_shards, void* out, size_t count) {
  const Job job{shards, num_shards, out, count, op == ReduceOp::avg};
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return reduce_with<Sum>(dtype, job);
    case ReduceOp::min:
      return reduce_with<Min>(dtype, job);
    case ReduceOp::max:
      return reduce_with<Max>(dtype, job);
    case ReduceOp::prod:
      return reduce_with<Product>(dtype, job);
  }
}

}  // namespace mr::kernels
