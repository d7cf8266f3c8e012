#include <algorithm>

#include "elements.h"
#include "floats.h"
#include "kernels.h"
#include "vectorised.h"

namespace mr::kernels {
namespace {

struct Int8 {
  using Storage = int8_t;
  static constexpr uint32_t kNothing = 0;
  MR_HOST_DEVICE static float largest() { return 127; }
  MR_HOST_DEVICE static float to_float(int8_t bits) { return float(bits); }
  // |value| is 127 and a little at most. The sum's last place is 1: the processor rounds to an integer.
  MR_HOST_DEVICE static int8_t from_float(float value, bool) {
    constexpr float kPower = 12582912;  // 1.5 * 2^23
    const float cut = value > 127 ? 127.0f : value < -127 ? -127.0f : value;
    return int8_t(int32_t(float_bits(cut + kPower) - float_bits(kPower)));
  }
};

// Calls use(Int8()), or use(the format) of an fp8 dtype.
template <typename Use>
void with_quantized(mr_dtype dtype, const Use& use) {
  if (dtype == MR_I8) return use(Int8());
  with_fp8(dtype, use);
}

template <typename Use>
void with_float(mr_dtype dtype, const Use& use) {
  switch (dtype) {
    case MR_F32:
      return use(Element<MR_F32>());
    case MR_F16:
      return use(Element<MR_F16>());
    case MR_BF16:
      return use(Element<MR_BF16>());
    default:
      return;
  }
}

struct QuantizeJob {
  const void* x;
  void* q;
  float* scales;
  float* error;
  size_t count, block;
};

template <typename X, typename Q, bool kWithError>
struct QuantizeLoop {
  MR_HOST_DEVICE static float value(typename X::Storage x, float error) {
    return kWithError ? X::load(x) + error : X::load(x);
  }

  MR_HOST_DEVICE static void run(const QuantizeJob& job) {
    for (size_t begin = 0, at = 0; begin < job.count; begin += job.block, ++at) {
      const size_t size = job.count - begin < job.block ? job.count - begin : job.block;
      job.scales[at] =
          one_block(static_cast<const typename X::Storage*>(job.x) + begin,
                    static_cast<typename Q::Storage*>(job.q) + begin, kWithError ? job.error + begin : nullptr, size);
    }
  }

  MR_HOST_DEVICE static float one_block(const typename X::Storage* x, typename Q::Storage* q, float* error,
                                        size_t size) {
    uint32_t most = 0;  // as bits, magnitudes of floats are in order, and NaN is above Inf
    for (size_t i = 0; i < size; ++i) {
      const uint32_t magnitude = float_bits(value(x[i], kWithError ? error[i] : 0)) & 0x7fffffffu;
      most = magnitude > most ? magnitude : most;
    }
    if (most >= kFloatInf) {  // all of the block dequantises to NaN
      for (size_t i = 0; i < size; ++i) q[i] = 0;
      if constexpr (kWithError)
        for (size_t i = 0; i < size; ++i) error[i] = 0;
      return float_from_bits(kFloatNaN);
    }
    const float exact = float_from_bits(most) / Q::largest();
    const float scale = exact == 0 ? 1.0f : exact;  // nothing there, or too small for any scale
    for (size_t i = 0; i < size; ++i) {
      const float v = value(x[i], kWithError ? error[i] : 0);
      const auto bits = Q::from_float(v / scale, true);
      q[i] = bits;
      if constexpr (kWithError) error[i] = v - Q::to_float(bits) * scale;
    }
    return scale;
  }
};

// out = or += values * scale
template <bool kAdd>
struct Scale {
  MR_HOST_DEVICE static void run(float* __restrict out, const float* __restrict values, float scale, size_t count) {
    for (size_t i = 0; i < count; ++i) out[i] = kAdd ? out[i] + values[i] * scale : values[i] * scale;
  }
};

struct OneNaN {
  MR_HOST_DEVICE static void run(float* values, size_t count) {
    for (size_t i = 0; i < count; ++i) values[i] = values[i] != values[i] ? float_from_bits(kFloatNaN) : values[i];
  }
};

constexpr size_t kPiece = 2048;  // elements whose values in fp32 stay in the innermost cache

// Elements [begin, begin + count) of a quantised run, with their scales, into or added to `out`.
void scaled(mr_dtype dtype, const void* q, const float* scales, size_t begin, size_t count, size_t block, bool add,
            float* out) {
  alignas(64) float values[kPiece];
  to_floats(dtype, static_cast<const uint8_t*>(q) + begin, values, count);
  for (size_t at = begin; at < begin + count;) {
    const size_t end = std::min((at / block + 1) * block, begin + count), i = at - begin;
    const auto run = add ? run_vectorised<Scale<true>, float*, const float*, float, size_t>
                         : run_vectorised<Scale<false>, float*, const float*, float, size_t>;
    run(out + i, values + i, scales[at / block], end - at);
    at = end;
  }
}

}  // namespace

void quantize(mr_dtype x_dtype, const void* x, mr_dtype q_dtype, void* q, float* scales, float* error, size_t count,
              size_t block) {
  const QuantizeJob job{x, q, scales, error, count, block};
  with_float(x_dtype, [&](auto from) {
    with_quantized(q_dtype, [&](auto to) {
      if (error != nullptr)
        run_vectorised<QuantizeLoop<decltype(from), decltype(to), true>, const QuantizeJob&>(job);
      else
        run_vectorised<QuantizeLoop<decltype(from), decltype(to), false>, const QuantizeJob&>(job);
    });
  });
}

void dequantize(mr_dtype q_dtype, const void* q, const float* scales, mr_dtype out_dtype, void* out, size_t count,
                size_t block) {
  alignas(64) float values[kPiece];
  for (size_t begin = 0; begin < count; begin += kPiece) {
    const size_t size = std::min(kPiece, count - begin);
    const bool direct = out_dtype == MR_F32;
    float* const to = direct ? static_cast<float*>(out) + begin : values;
    scaled(q_dtype, q, scales, begin, size, block, false, to);
    if (!direct) from_floats(out_dtype, values, static_cast<uint8_t*>(out) + begin * dtype_size(out_dtype), size);
  }
}

void dequantize_sum(mr_dtype q_dtype, const void* const* qs, const float* const* scales, size_t num_shards, float* out,
                    size_t count, size_t block) {
  for (size_t begin = 0; begin < count; begin += kPiece) {
    const size_t size = std::min(kPiece, count - begin);
    for (size_t shard = 0; shard < num_shards; ++shard)
      scaled(q_dtype, qs[shard], scales[shard], begin, size, block, shard > 0, out + begin);
    run_vectorised<OneNaN>(out + begin, size);
  }
}

}  // namespace mr::kernels
