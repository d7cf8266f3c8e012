#include "fp8.h"

#include <algorithm>

#include "vectorised.h"

#ifdef __x86_64__
#include <immintrin.h>

#include "fp8_avx2.h"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 says it of its own header, of values on purpose
#endif

namespace mr::kernels {
namespace {

#ifdef __x86_64__

// Compilers take instructions of avx512bf16 for nothing but what names them, which is only where adds_pairs().
#define MR_VBMI_TARGET target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,prefer-vector-width=512")
#define MR_VBMI __attribute__((MR_VBMI_TARGET))
#define MR_VBMI_LAMBDA __attribute__((MR_VBMI_TARGET, always_inline))
#define MR_VBMI_INLINE MR_VBMI_LAMBDA inline

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
    const __m512i in = _mm512_loadu_si512(src), zero = _mm512_setzero_si512();
    Bytes bf16 = bytes(in);
    if constexpr (kSignIsNaN<Format>) {
      const __mmask64 is_nan = _mm512_cmpeq_epi8_mask(in, _mm512_set1_epi8(char(0x80)));
      bf16.low = _mm512_mask_mov_epi8(bf16.low, is_nan, _mm512_set1_epi8(char(0xc0)));
      bf16.high = _mm512_mask_mov_epi8(bf16.high, is_nan, _mm512_set1_epi8(0x7f));
    }
    const Halves half = halves(bf16);
    return {{_mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, half.low)),
             _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, half.low)),
             _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, half.high)),
             _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, half.high))}};
  }

  // But for the NaN that lies where -0 would be: it is -0.
  MR_VBMI_INLINE Halves halves(__m512i in) const { return halves(bytes(in)); }

 private:
  struct Bytes {
    __m512i low, high;
  };

  MR_VBMI_INLINE Bytes bytes(__m512i in) const {
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], in, high_[1]);
    return {_mm512_permutex2var_epi8(low_[0], in, low_[1]),
            _mm512_ternarylogic_epi32(magnitude, in, _mm512_set1_epi8(char(0x80)), 0xf8)};  // m | (in & 0x80)
  }

  static MR_VBMI_INLINE Halves halves(const Bytes& of) {
    return {_mm512_unpacklo_epi8(of.low, of.high), _mm512_unpackhi_epi8(of.low, of.high)};
  }

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
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i in = _mm512_min_epu32(_mm512_and_si512(bits, all(0x7fffffff)), all(kMostAsFloat<Format>));
  const __m512i power = all(Format::kRoundingPower);
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(in), _mm512_castsi512_ps(power))), power);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(in, Format::kShift), all(1));
  const __m512i half = all((1u << (Format::kShift - 1)) - 1 - Format::kRebias);
  const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(in, half), is_odd), Format::kShift);
  const __mmask16 is_small = _mm512_cmplt_epu32_mask(in, all(Format::kSmallestNormalAsFloat));
  __m512i out = _mm512_mask_mov_epi32(normal, is_small, subnormal);
  const __m512i sign = _mm512_srli_epi32(bits, 24);
  if constexpr (kSignIsNaN<Format>)
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

// Sums of four values of one format, as the instruction that adds products of bf16 in pairs takes them (in order, each
// rounded: the odd word of a pair first), are multiples of the format's smallest step: what is below its normal numbers
// is exact, and 16 bits and one for all that were cut off round as all bits do.
bool adds_pairs() {
  static const bool has_bf16 = __builtin_cpu_supports("avx512bf16");
  return has_bf16;
}

// Format::from_float of such sums. Rounded in 16 bits, each has a place: how far a normal number's code is above the
// first one's. Places below are negative, those of codes far apart, and 0 is at the lowest.
template <typename Format>
class NarrowSums {
 public:
  MR_VBMI_INLINE NarrowSums() {
    static const Table table;
    small_ = _mm512_load_si512(table.small);
    high_ = _mm512_load_si512(table.high);
    low_ = _mm512_load_si512(table.low);
  }

  // 64 bytes in the order that they were loaded in.
  MR_VBMI_INLINE __m512i operator()(const Floats64& from) const {
    const __m512i first = high_words(from.part[0], from.part[1]), last = high_words(from.part[2], from.part[3]);
    const __m512i first_in = magnitudes(first, from.part[0], from.part[1]);
    const __m512i last_in = magnitudes(last, from.part[2], from.part[3]);
    const __m512i place = _mm512_packs_epi16(places(first_in), places(last_in));
    const __m512i normal =
        _mm512_add_epi8(_mm512_min_epi8(place, _mm512_set1_epi8(char(kOver - kFirst))), _mm512_set1_epi8(kFirst));
    const __m512i magnitude = _mm512_mask_permutexvar_epi8(normal, _mm512_movepi8_mask(place), place, small_);
    const __m512i sign = _mm512_packs_epi16(first, last);
    __m512i out = _mm512_ternarylogic_epi32(magnitude, sign, _mm512_set1_epi8(char(0x80)), 0xf8);  // m | (s & 0x80)
    if constexpr (kOver != Format::kNaN)  // else a NaN is just the largest of all
      if (_mm512_cmpeq_epi8_mask(place, _mm512_set1_epi8(127)) != 0) {
        const __m512i is_nan = _mm512_packs_epi16(nans(first_in), nans(last_in));
        out = _mm512_mask_mov_epi8(out, _mm512_movepi8_mask(is_nan), _mm512_set1_epi8(char(Format::kNaN)));
      }
    return out;
  }

 private:
  static constexpr uint32_t kOver = kSignIsNaN<Format> ? Format::kNaN : Format::kLargest + kHasInf<Format>;
  static constexpr int kShift = Format::kShift - 16;
  static constexpr int kFirst = 1 << (23 - Format::kShift);  // the code of the smallest normal number
  static constexpr int kRebias = int(Format::kRebias >> 16) + (kFirst << kShift);

  MR_VBMI_INLINE __m512i high_words(__m512 a, __m512 b) const {
    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), high_, _mm512_castps_si512(b));
  }

  MR_VBMI_INLINE __m512i magnitudes(__m512i high, __m512 a, __m512 b) const {
    const __m512i low = _mm512_permutex2var_epi16(_mm512_castps_si512(a), low_, _mm512_castps_si512(b));
    const __m512i cut = _mm512_min_epu16(low, words(1));
    return _mm512_ternarylogic_epi32(high, words(0x7fff), cut, 0xea);  // (h & 0x7fff) | c
  }

  static MR_VBMI_INLINE __m512i places(__m512i in) {
    const __mmask32 is_odd = _mm512_test_epi16_mask(in, words(1u << kShift));
    const __m512i half = _mm512_add_epi16(in, words(uint32_t((1 << (kShift - 1)) - 1 - kRebias)));
    return _mm512_srai_epi16(_mm512_mask_add_epi16(half, is_odd, half, words(1)), kShift);
  }

  static MR_VBMI_INLINE __m512i nans(__m512i in) {
    return _mm512_movm_epi16(_mm512_cmpgt_epu16_mask(in, words(kFloatInf >> 16)));
  }

  struct alignas(64) Table {
    uint8_t small[64] = {};      // by the last six bits of a place
    uint16_t high[32], low[32];  // which words of two registers, as packing orders their halves
    Table() {
      for (uint32_t code = 1; code < kFirst; ++code) {
        const int bits = int(float_bits(Format::to_float(uint8_t(code))) >> 16);
        small[((bits - kRebias) >> kShift) & 63] = uint8_t(code);
      }
      for (int i = 0; i < 32; ++i) {
        low[i] = uint16_t((i & 4) * 8 + (i / 8 * 4 + (i & 3)) * 2);
        high[i] = uint16_t(low[i] + 1);
      }
    }
  };
  __m512i small_, high_, low_;
};

// dst[at ..] = of(at), 64 bytes each.
template <typename Of>
MR_VBMI_INLINE size_t each_64(const Fp8Shards& shards, uint8_t* dst, size_t count, const Of& of) {
  constexpr size_t kAhead = 2048;  // bytes
  size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    for (const uint8_t* shard : shards) _mm_prefetch(reinterpret_cast<const char*>(shard + i + kAhead), _MM_HINT_T0);
    _mm512_storeu_si512(dst + i, of(i));
  }
  return i;
}

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

  MR_VBMI static size_t sum_of_four_in_pairs(const Fp8Shards& shards, uint8_t* dst, size_t count) {
    const Widen<Format> widen;
    const NarrowSums<Format> narrow;
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const __m512 none = _mm512_set1_ps(-0.0f);  // to which -0 can be added
    return each_64(shards, dst, count, [&](size_t at) MR_VBMI_LAMBDA {
      __m512i in[4];
      for (int k = 0; k < 4; ++k) in[k] = _mm512_loadu_si512(shards[k] + at);
      Floats64 total{{none, none, none, none}};
      for (int pair = 0; pair < 4; pair += 2) {
        const auto a = widen.halves(in[pair]), b = widen.halves(in[pair + 1]);
        total.part[0] = _mm512_dpbf16_ps(total.part[0], (__m512bh)_mm512_unpacklo_epi16(b.low, a.low), ones);
        total.part[1] = _mm512_dpbf16_ps(total.part[1], (__m512bh)_mm512_unpackhi_epi16(b.low, a.low), ones);
        total.part[2] = _mm512_dpbf16_ps(total.part[2], (__m512bh)_mm512_unpacklo_epi16(b.high, a.high), ones);
        total.part[3] = _mm512_dpbf16_ps(total.part[3], (__m512bh)_mm512_unpackhi_epi16(b.high, a.high), ones);
      }
      const __m512i out = narrow(total);
      if constexpr (!kSignIsNaN<Format>) return out;
      const __m512i nan = _mm512_set1_epi8(char(Format::kNaN));  // the lowest number of 8 bits
      const __m512i lowest = _mm512_min_epi8(_mm512_min_epi8(in[0], in[1]), _mm512_min_epi8(in[2], in[3]));
      return _mm512_mask_mov_epi8(out, _mm512_cmpeq_epi8_mask(lowest, nan), nan);
    });
  }

  MR_VBMI static size_t sum_of_four(const Fp8Shards& shards, float factor, uint8_t* dst, size_t count) {
    if (factor == 1.0f && adds_pairs()) return sum_of_four_in_pairs(shards, dst, count);
    const Widen<Format> widen;
    const __m512 factors = _mm512_set1_ps(factor);
    return each_64(shards, dst, count, [&](size_t at) MR_VBMI_LAMBDA {
      Floats64 total = sum(widen, shards, at);
      for (__m512& part : total.part) part = _mm512_mul_ps(part, factors);
      return narrowed<Format>(total);
    });
  }
};

template <typename Format, typename Use>
size_t with_loops(const Use& use) {
  if (is_quick()) return use(Loops<Format>());
  return isa() == Isa::portable ? 0 : use(Avx2Loops<Format>());
}

#else

template <typename Format, typename Use>
size_t with_loops(const Use&) {
  return 0;
}

#endif

}  // namespace

template <typename Format>
size_t Fp8Runs<Format>::to_floats(const uint8_t* src, float* dst, size_t count) {
  return with_loops<Format>([&](auto loops) { return loops.to_floats(src, dst, count); });
}

template <typename Format>
size_t Fp8Runs<Format>::from_floats(const float* src, uint8_t* dst, size_t count) {
  return with_loops<Format>([&](auto loops) { return loops.from_floats(src, dst, count); });
}

template <typename Format>
size_t Fp8Runs<Format>::sums_of_four(const Fp8Shards& shards, float* dst, size_t count) {
  return with_loops<Format>([&](auto loops) { return loops.sums_of_four(shards, dst, count); });
}

template <typename Format>
size_t Fp8Runs<Format>::sum_of_four(const Fp8Shards& shards, float factor, uint8_t* dst, size_t count) {
  return with_loops<Format>([&](auto loops) { return loops.sum_of_four(shards, factor, dst, count); });
}

template struct Fp8Runs<E4M3FN>;
template struct Fp8Runs<E5M2>;
template struct Fp8Runs<E4M3FNUZ>;
template struct Fp8Runs<E5M2FNUZ>;

}  // namespace mr::kernels
