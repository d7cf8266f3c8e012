// Runs of the four fp8 formats with AVX2, 32 elements at a time: for fp8.cc, where the processor has no tables of 128
// bytes. Formats are widened by way of bf16, which has every value of theirs.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "fp8.h"
#include "vectorised.h"

namespace mr::kernels {

#define MR_AVX2_INLINE MR_AVX2 inline __attribute__((always_inline))

// What a format's codes are, beside numbers.
template <typename Format>
constexpr bool kSignIsNaN = Format::kNaN == Format::kSign;  // where -0 would be, the fnuz forms have their only NaN
template <typename Format>
constexpr bool kHasInf = !kSignIsNaN<Format> && Format::kNaN != Format::kMagnitude;
// How from_float cuts what is too large.
template <typename Format>
constexpr uint32_t kMostAsFloat =
    kHasInf<Format> || kSignIsNaN<Format> ? Format::kOverAsFloat : Format::kLargestAsFloat;

// 32 elements in the order that bytes unpack in: 0..3, 16..19 in the first, the next four of each in the others.
struct Floats32 {
  __m256 part[4];
};

MR_AVX2_INLINE __m256i bytes(int value) { return _mm256_set1_epi8(char(value)); }
MR_AVX2_INLINE __m256i ints(uint32_t value) { return _mm256_set1_epi32(int(value)); }

template <typename Format>
class Avx2Widen {
 public:
  // Codes that are no normal numbers have their values in a table of 16: by their last four bits, but the fnuz forms'
  // NaN is the last one.
  MR_AVX2_INLINE Avx2Widen() {
    static const Table table;
    low_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table.low)));
    high_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table.high)));
  }

  MR_AVX2_INLINE Floats32 load(const uint8_t* src) const {
    const __m256i in = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)), zero = _mm256_setzero_si256();
    const __m256i magnitude = _mm256_and_si256(in, bytes(0x7f));
    __m256i sign = _mm256_and_si256(in, bytes(0x80));
    __m256i at = magnitude, in_table = _mm256_cmpgt_epi8(bytes(1 << kMantissa), magnitude);
    if constexpr (kSignIsNaN<Format>) {
      const __m256i is_nan = _mm256_cmpeq_epi8(in, bytes(0x80));
      at = _mm256_or_si256(at, _mm256_and_si256(is_nan, bytes(15)));
      sign = _mm256_andnot_si256(is_nan, sign);
    } else {
      in_table = _mm256_or_si256(in_table, _mm256_cmpgt_epi8(magnitude, bytes(Format::kLargest)));
    }
    const __m256i low = _mm256_shuffle_epi8(low_, at), high = _mm256_shuffle_epi8(high_, at);
    const __m256i first = bf16(_mm256_unpacklo_epi8(magnitude, zero), _mm256_unpacklo_epi8(low, high),
                               _mm256_unpacklo_epi8(in_table, in_table), _mm256_unpacklo_epi8(zero, sign));
    const __m256i last = bf16(_mm256_unpackhi_epi8(magnitude, zero), _mm256_unpackhi_epi8(low, high),
                              _mm256_unpackhi_epi8(in_table, in_table), _mm256_unpackhi_epi8(zero, sign));
    return {{_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first)),
             _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first)),
             _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, last)),
             _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, last))}};
  }

  MR_AVX2_INLINE Floats32 sum(const Fp8Shards& shards, size_t at) const {
    Floats32 out = load(shards[0] + at);
    for (int shard = 1; shard < 4; ++shard) {
      const Floats32 next = load(shards[shard] + at);
      for (int k = 0; k < 4; ++k) out.part[k] = _mm256_add_ps(out.part[k], next.part[k]);
    }
    return out;
  }

 private:
  static constexpr int kMantissa = 23 - Format::kShift;

  struct alignas(16) Table {
    uint8_t low[16] = {}, high[16] = {};
    Table() {
      for (uint32_t code = 0; code < 1u << kMantissa; ++code) put(code, code);
      for (uint32_t code = 0x7c; kHasInf<Format> && code < 0x80; ++code) put(code & 15, code);
      if (!kHasInf<Format>) put(15, Format::kNaN);
    }
    void put(uint32_t at, uint32_t code) {
      const uint32_t bf16 = float_bits(Format::to_float(uint8_t(code))) >> 16;
      low[at] = uint8_t(bf16);
      high[at] = uint8_t(bf16 >> 8);
    }
  };

  static MR_AVX2_INLINE __m256i bf16(__m256i magnitude, __m256i table, __m256i in_table, __m256i sign) {
    const __m256i shifted = _mm256_slli_epi16(magnitude, 7 - kMantissa);
    const __m256i normal = _mm256_add_epi16(shifted, _mm256_set1_epi16(short(Format::kRebias >> 16)));
    return _mm256_or_si256(_mm256_blendv_epi8(normal, table, in_table), sign);
  }

  __m256i low_, high_;
};

// The magnitude's code.
template <typename Format>
MR_AVX2_INLINE __m256i narrowed(__m256 value) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(value), ints(0x7fffffff));
  const __m256i in = _mm256_min_epu32(magnitude, ints(kMostAsFloat<Format>)), power = ints(Format::kRoundingPower);
  const __m256 rounded = _mm256_add_ps(_mm256_castsi256_ps(in), _mm256_castsi256_ps(power));
  const __m256i subnormal = _mm256_sub_epi32(_mm256_castps_si256(rounded), power);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(in, Format::kShift), ints(1));
  const __m256i half = _mm256_add_epi32(in, ints((1u << (Format::kShift - 1)) - 1 - Format::kRebias));
  const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(half, is_odd), Format::kShift);
  return _mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(ints(Format::kSmallestNormalAsFloat), in));
}

// Signs survive it, and masks.
MR_AVX2_INLINE __m256i packed(const __m256i (&of)[4]) {
  return _mm256_packs_epi16(_mm256_packs_epi32(of[0], of[1]), _mm256_packs_epi32(of[2], of[3]));
}

// 32 bytes in the order that they were loaded in.
template <typename Format>
MR_AVX2_INLINE __m256i narrowed(const Floats32& from) {
  __m256i code[4], bits[4], nan[4];
  for (int k = 0; k < 4; ++k) {
    code[k] = narrowed<Format>(from.part[k]);
    bits[k] = _mm256_castps_si256(from.part[k]);
    nan[k] = _mm256_castps_si256(_mm256_cmp_ps(from.part[k], from.part[k], _CMP_UNORD_Q));
  }
  const __m256i first = _mm256_packs_epi32(code[0], code[1]), last = _mm256_packs_epi32(code[2], code[3]);
  const __m256i magnitude = _mm256_packus_epi16(first, last);
  __m256i sign = _mm256_and_si256(packed(bits), bytes(0x80));
  if constexpr (kSignIsNaN<Format>)
    sign = _mm256_andnot_si256(_mm256_cmpeq_epi8(magnitude, _mm256_setzero_si256()), sign);
  return _mm256_blendv_epi8(_mm256_or_si256(magnitude, sign), bytes(Format::kNaN), packed(nan));
}

MR_AVX2_INLINE void store_in_order(const Floats32& from, float* dst) {
  const __m256* p = from.part;
  _mm256_storeu_ps(dst, _mm256_permute2f128_ps(p[0], p[1], 0x20));
  _mm256_storeu_ps(dst + 8, _mm256_permute2f128_ps(p[2], p[3], 0x20));
  _mm256_storeu_ps(dst + 16, _mm256_permute2f128_ps(p[0], p[1], 0x31));
  _mm256_storeu_ps(dst + 24, _mm256_permute2f128_ps(p[2], p[3], 0x31));
}

MR_AVX2_INLINE void store(uint8_t* dst, __m256i value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), value); }

template <typename Format>
struct Avx2Loops {
  MR_AVX2 static size_t to_floats(const uint8_t* src, float* dst, size_t count) {
    const Avx2Widen<Format> widen;
    size_t i = 0;
    for (; i + 32 <= count; i += 32) store_in_order(widen.load(src + i), dst + i);
    return i;
  }

  MR_AVX2 static size_t from_floats(const float* src, uint8_t* dst, size_t count) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
      Floats32 in;
      for (int k = 0; k < 4; ++k) in.part[k] = _mm256_loadu_ps(src + i + 8 * k);
      store(dst + i, _mm256_permutevar8x32_epi32(narrowed<Format>(in), order));
    }
    return i;
  }

  MR_AVX2 static size_t sums_of_four(const Fp8Shards& shards, float* dst, size_t count) {
    const Avx2Widen<Format> widen;
    size_t i = 0;
    for (; i + 32 <= count; i += 32) store_in_order(widen.sum(shards, i), dst + i);
    return i;
  }

  MR_AVX2 static size_t sum_of_four(const Fp8Shards& shards, float factor, uint8_t* dst, size_t count) {
    const Avx2Widen<Format> widen;
    const __m256 factors = _mm256_set1_ps(factor);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
      Floats32 total = widen.sum(shards, i);
      for (__m256& part : total.part) part = _mm256_mul_ps(part, factors);
      store(dst + i, narrowed<Format>(total));
    }
    return i;
  }
};

}  // namespace mr::kernels
