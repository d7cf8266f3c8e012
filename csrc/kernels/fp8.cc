#include "fp8.h"

#include "elements.h"
#include "vectorised.h"

#ifdef __x86_64__
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 says it of its own header, of values on purpose
#endif

namespace mr::kernels {
namespace {

#ifdef __x86_64__

#define MR_VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,prefer-vector-width=512")))
#define MR_PAIRS \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,prefer-vector-width=512")))
#define MR_VBMI_INLINE MR_VBMI inline __attribute__((always_inline))

bool is_quick() {
  static const bool has_vbmi = __builtin_cpu_supports("avx512vbmi");
  return isa() == Isa::avx512 && has_vbmi;
}

// What every function here is written in terms of. 64 elements are in four registers as bytes unpack into them: 0..3,
// 16..19, 32..35, 48..51 in the first, the next four of each in the others.
struct Floats64 {
  __m512 part[4];
};

// By way of bf16, which has every value of fp8. The two bytes of a magnitude come from tables of 128 bytes, which lie
// in two registers each.
template <typename Format>
class Widen {
 public:
  MR_VBMI_INLINE Widen() {
    static const Tables tables;
    for (int i = 0; i < 2; ++i) {
      low_[i] = _mm512_load_si512(tables.low + 64 * i);
      high_[i] = _mm512_load_si512(tables.high + 64 * i);
    }
  }

  struct Halves {
    __m512i low, high;  // as bf16: bytes 0..7, 16..23, .. and the next eight of each
  };

  MR_VBMI_INLINE Floats64 load(const uint8_t* src) const {
    const __m512i zero = _mm512_setzero_si512();
    const Halves bf16 = halves(src);
    return {{_mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, bf16.low)),
             _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, bf16.low)),
             _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, bf16.high)),
             _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, bf16.high))}};
  }

  MR_VBMI_INLINE Halves halves(const uint8_t* src) const {
    const __m512i in = _mm512_loadu_si512(src), sign = _mm512_set1_epi8(char(0x80));
    __m512i low = _mm512_permutex2var_epi8(low_[0], in, low_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], in, high_[1]);
    __m512i high = _mm512_ternarylogic_epi32(magnitude, in, sign, 0xf8);  // magnitude | (in & sign)
    if constexpr (Format::kNaN == Format::kSign) {                        // where -0 would be
      const __mmask64 is_nan = _mm512_cmpeq_epi8_mask(in, sign);
      low = _mm512_mask_mov_epi8(low, is_nan, _mm512_set1_epi8(char(0xc0)));
      high = _mm512_mask_mov_epi8(high, is_nan, _mm512_set1_epi8(0x7f));
    }
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }

 private:
  struct alignas(64) Tables {
    uint8_t low[128], high[128];
    Tables() {
      for (uint32_t bits = 0; bits < 128; ++bits) {
        const uint32_t bf16 = float_bits(Format::to_float(uint8_t(bits))) >> 16;
        low[bits] = uint8_t(bf16);
        high[bits] = uint8_t(bf16 >> 8);
      }
    }
  };
  __m512i low_[2], high_[2];
};

MR_VBMI_INLINE __m512i all(uint32_t value) { return _mm512_set1_epi32(int(value)); }
MR_VBMI_INLINE __m512i words(uint32_t value) { return _mm512_set1_epi16(short(value)); }

// Format::from_float of each, in the lowest byte.
template <typename Format>
MR_VBMI_INLINE __m512i narrowed(__m512 value) {
  constexpr bool kHasInf = Format::kNaN != Format::kSign && Format::kNaN != Format::kMagnitude;
  constexpr bool kUnsignedZero = Format::kNaN == Format::kSign;
  constexpr uint32_t kMost = kHasInf || kUnsignedZero ? Format::kOverAsFloat : Format::kLargestAsFloat;
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i in = _mm512_min_epu32(_mm512_and_si512(bits, all(0x7fffffff)), all(kMost));
  const __m512i power = all(Format::kRoundingPower);
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(in), _mm512_castsi512_ps(power))), power);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(in, Format::kShift), all(1));
  const __m512i half = all((1u << (Format::kShift - 1)) - 1 - Format::kRebias);
  const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(in, half), is_odd), Format::kShift);
  const __mmask16 is_small = _mm512_cmplt_epu32_mask(in, all(Format::kSmallestNormalAsFloat));
  __m512i out = _mm512_mask_mov_epi32(normal, is_small, subnormal);
  const __m512i sign = _mm512_srli_epi32(bits, 24);
  if constexpr (kUnsignedZero)
    out = _mm512_mask_or_epi32(out, _mm512_test_epi32_mask(out, out), out, _mm512_and_si512(sign, all(0x80)));
  else
    out = _mm512_ternarylogic_epi32(out, sign, all(0x80), 0xf8);  // out | (sign & 0x80)
  return _mm512_mask_mov_epi32(out, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), all(Format::kNaN));
}

// 64 bytes in the order that they were loaded in.
template <typename Format>
MR_VBMI_INLINE __m512i narrowed(const Floats64& from) {
  const __m512i first = _mm512_packus_epi32(narrowed<Format>(from.part[0]), narrowed<Format>(from.part[1]));
  const __m512i last = _mm512_packus_epi32(narrowed<Format>(from.part[2]), narrowed<Format>(from.part[3]));
  return _mm512_packus_epi16(first, last);
}

template <typename Format>
MR_VBMI_INLINE Floats64 sum(const Widen<Format>& widen, const Fp8Shards& shards, size_t at) {
  Floats64 out = widen.load(shards[0] + at);
  for (int shard = 1; shard < 4; ++shard) {
    const Floats64 next = widen.load(shards[shard] + at);
    for (int k = 0; k < 4; ++k) out.part[k] = _mm512_add_ps(out.part[k], next.part[k]);
  }
  return out;
}

MR_VBMI_INLINE void store_in_order(const Floats64& from, float* dst) {
  const __m512* p = from.part;
  const __m512 first[2] = {_mm512_shuffle_f32x4(p[0], p[1], 0x44), _mm512_shuffle_f32x4(p[2], p[3], 0x44)};
  const __m512 last[2] = {_mm512_shuffle_f32x4(p[0], p[1], 0xee), _mm512_shuffle_f32x4(p[2], p[3], 0xee)};
  _mm512_storeu_ps(dst, _mm512_shuffle_f32x4(first[0], first[1], 0x88));
  _mm512_storeu_ps(dst + 16, _mm512_shuffle_f32x4(first[0], first[1], 0xdd));
  _mm512_storeu_ps(dst + 32, _mm512_shuffle_f32x4(last[0], last[1], 0x88));
  _mm512_storeu_ps(dst + 48, _mm512_shuffle_f32x4(last[0], last[1], 0xdd));
}

// Four values of e4m3, in either form, add up exactly in fp32: multiples of the smallest step, with room to spare. So
// the order does not matter, and processors that add products of bf16 in pairs may do it.
template <typename Format>
constexpr bool kSumsExactly = Format::kShift == 20;

bool adds_pairs() {
  static const bool has_bf16 = __builtin_cpu_supports("avx512bf16");
  return has_bf16;
}

// Format::from_float of such sums, 32 from two registers as bytes unpack into them, in 16 bits each. What is below the
// normal numbers is exact, and looked up by its bits.
template <typename Format>
class NarrowExact {
 public:
  MR_VBMI_INLINE NarrowExact() {
    static const Table table;
    for (int i = 0; i < 2; ++i) small_[i] = _mm512_load_si512(table.codes + 32 * i);
  }

  MR_VBMI_INLINE __m512i operator()(__m512 first, __m512 last) const {
    const __m512i bits = _mm512_packus_epi32(halved(first), halved(last));
    const __m512i in = _mm512_and_si512(bits, words(0x7fff));
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi16(in, kShift), words(1));
    const __m512i half = words((1u << (kShift - 1)) - 1 - (Format::kRebias >> 16));
    const __m512i rounded = _mm512_srli_epi16(_mm512_add_epi16(_mm512_add_epi16(in, half), is_odd), kShift);
    __m512i out = _mm512_min_epu16(rounded, words(kMost));
    const __mmask32 is_small = _mm512_cmplt_epu16_mask(in, words(Format::kSmallestNormalAsFloat >> 16));
    const __m512i small = _mm512_permutex2var_epi16(small_[0], _mm512_srli_epi16(in, 5), small_[1]);
    out = _mm512_mask_mov_epi16(out, is_small, small);
    const __m512i sign = _mm512_srli_epi16(bits, 8);
    if constexpr (kUnsignedZero)
      out = _mm512_mask_mov_epi16(out, _mm512_test_epi16_mask(out, out),
                                  _mm512_ternarylogic_epi32(out, sign, words(0x80), 0xf8));
    else
      out = _mm512_ternarylogic_epi32(out, sign, words(0x80), 0xf8);
    return _mm512_mask_mov_epi16(out, _mm512_cmpgt_epu16_mask(in, words(kFloatInf >> 16)), words(Format::kNaN));
  }

 private:
  static constexpr bool kUnsignedZero = Format::kNaN == Format::kSign;
  static constexpr int kShift = Format::kShift - 16;
  static constexpr uint32_t kMost = kUnsignedZero ? Format::kSign : Format::kLargest;
  // Cut to 16 bits, the last of which stands for all that were cut off: rounded once more, it comes out right.
  static MR_VBMI_INLINE __m512i halved(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value), high = _mm512_srli_epi32(bits, 16);
    return _mm512_mask_or_epi32(high, _mm512_test_epi32_mask(bits, all(0xffff)), high, all(1));
  }
  struct alignas(64) Table {
    uint16_t codes[64] = {};
    Table() {
      for (uint32_t code = 0; code < 1u << (23 - Format::kShift); ++code)
        codes[float_bits(Format::to_float(uint8_t(code))) >> 21 & 63] = uint16_t(code);
    }
  };
  __m512i small_[2];
};

// The loops, for each format.
template <typename Format>
struct Loops {
  MR_VBMI static size_t to_floats(const uint8_t* src, float* dst, size_t count) {
    const Widen<Format> widen;
    size_t i = 0;
    for (; i + 64 <= count; i += 64) store_in_order(widen.load(src + i), dst + i);
    return i;
  }

  MR_VBMI static size_t from_floats(const float* src, uint8_t* dst, size_t count) {
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    size_t i = 0;
    for (; i + 64 <= count; i += 64) {
      Floats64 in;
      for (int k = 0; k < 4; ++k) in.part[k] = _mm512_loadu_ps(src + i + 16 * k);
      _mm512_storeu_si512(dst + i, _mm512_permutexvar_epi32(order, narrowed<Format>(in)));
    }
    return i;
  }

  MR_VBMI static size_t sums_of_four(const Fp8Shards& shards, float* dst, size_t count) {
    const Widen<Format> widen;
    size_t i = 0;
    for (; i + 64 <= count; i += 64) store_in_order(sum(widen, shards, i), dst + i);
    return i;
  }

  MR_PAIRS static size_t exact_sum_of_four(const Fp8Shards& shards, uint8_t* dst, size_t count) {
    const Widen<Format> widen;
    const NarrowExact<Format> narrow;
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const __m512 none = _mm512_set1_ps(-0.0f);  // to which -0 can be added
    size_t i = 0;
    for (; i + 64 <= count; i += 64) {
      for (const uint8_t* shard : shards) _mm_prefetch(reinterpret_cast<const char*>(shard + i + kAhead), _MM_HINT_T0);
      Floats64 total{{none, none, none, none}};
      for (int pair = 0; pair < 4; pair += 2) {
        const auto a = widen.halves(shards[pair] + i), b = widen.halves(shards[pair + 1] + i);
        total.part[0] = _mm512_dpbf16_ps(total.part[0], (__m512bh)_mm512_unpacklo_epi16(a.low, b.low), ones);
        total.part[1] = _mm512_dpbf16_ps(total.part[1], (__m512bh)_mm512_unpackhi_epi16(a.low, b.low), ones);
        total.part[2] = _mm512_dpbf16_ps(total.part[2], (__m512bh)_mm512_unpacklo_epi16(a.high, b.high), ones);
        total.part[3] = _mm512_dpbf16_ps(total.part[3], (__m512bh)_mm512_unpackhi_epi16(a.high, b.high), ones);
      }
      const __m512i first = narrow(total.part[0], total.part[1]), last = narrow(total.part[2], total.part[3]);
      _mm512_storeu_si512(dst + i, _mm512_packus_epi16(first, last));
    }
    return i;
  }

  MR_VBMI static size_t sum_of_four(const Fp8Shards& shards, float factor, uint8_t* dst, size_t count) {
    if constexpr (kSumsExactly<Format>)
      if (factor == 1.0f && adds_pairs()) return exact_sum_of_four(shards, dst, count);
    const Widen<Format> widen;
    const __m512 factors = _mm512_set1_ps(factor);
    size_t i = 0;
    for (; i + 64 <= count; i += 64) {
      for (const uint8_t* shard : shards) _mm_prefetch(reinterpret_cast<const char*>(shard + i + kAhead), _MM_HINT_T0);
      Floats64 total = sum(widen, shards, i);
      if (factor != 1.0f)  // is looked at once, before the loop
        for (__m512& part : total.part) part = _mm512_mul_ps(part, factors);
      _mm512_storeu_si512(dst + i, narrowed<Format>(total));
    }
    return i;
  }

  static constexpr size_t kAhead = 1024;  // bytes
};

// use(Loops<the format>()) of an fp8 dtype, where the processor is one of these; else 0.
template <typename Use>
size_t with_loops(mr_dtype dtype, const Use& use) {
  if (!is_quick()) return 0;
  switch (dtype) {
    case MR_E4M3FN:
      return use(Loops<E4M3FN>());
    case MR_E5M2:
      return use(Loops<E5M2>());
    case MR_E4M3FNUZ:
      return use(Loops<E4M3FNUZ>());
    case MR_E5M2FNUZ:
      return use(Loops<E5M2FNUZ>());
    default:
      return 0;
  }
}

#else

struct NoLoops {
  static size_t to_floats(const uint8_t*, float*, size_t) { return 0; }
  static size_t from_floats(const float*, uint8_t*, size_t) { return 0; }
  static size_t sums_of_four(const Fp8Shards&, float*, size_t) { return 0; }
  static size_t sum_of_four(const Fp8Shards&, float, uint8_t*, size_t) { return 0; }
};

template <typename Use>
size_t with_loops(mr_dtype, const Use& use) {
  return use(NoLoops());
}

#endif

}  // namespace

size_t fp8_to_floats(mr_dtype dtype, const uint8_t* src, float* dst, size_t count) {
  return with_loops(dtype, [&](auto loops) { return loops.to_floats(src, dst, count); });
}

size_t fp8_from_floats(mr_dtype dtype, const float* src, uint8_t* dst, size_t count) {
  return with_loops(dtype, [&](auto loops) { return loops.from_floats(src, dst, count); });
}

size_t fp8_sums_of_four(mr_dtype dtype, const Fp8Shards& shards, float* dst, size_t count) {
  return with_loops(dtype, [&](auto loops) { return loops.sums_of_four(shards, dst, count); });
}

size_t fp8_sum_of_four(mr_dtype dtype, const Fp8Shards& shards, float factor, uint8_t* dst, size_t count) {
  return with_loops(dtype, [&](auto loops) { return loops.sum_of_four(shards, factor, dst, count); });
}

}  // namespace mr::kernels
