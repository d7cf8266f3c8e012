#include "floats.h"

#include "elements.h"
#include "vectorised.h"

#ifdef __x86_64__
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 says it of its own header, of values on purpose
#endif

namespace mr::kernels {
namespace {

template <typename Element>
struct ToFloats {
  MR_HOST_DEVICE static void run(const typename Element::Storage* __restrict src, float* __restrict dst, size_t count) {
    for (size_t i = 0; i < count; ++i) dst[i] = float(Element::load(src[i]));
  }
};

template <typename Element>
struct FromFloats {
  MR_HOST_DEVICE static void run(const float* __restrict src, typename Element::Storage* __restrict dst, size_t count) {
    for (size_t i = 0; i < count; ++i) dst[i] = Element::store(src[i]);
  }
};

template <typename Element>
struct SumFour {
  using Storage = typename Element::Storage;
  MR_HOST_DEVICE static void run(const Storage* a, const Storage* b, const Storage* c, const Storage* d,
                                 float* __restrict dst, size_t count) {
    for (size_t i = 0; i < count; ++i)
      dst[i] = ((Element::load(a[i]) + Element::load(b[i])) + Element::load(c[i])) + Element::load(d[i]);
  }
};

#ifdef __x86_64__

// fp8 by way of bf16, which has every value of it. The two bytes of a magnitude come from tables of 128 bytes, which
// lie in two registers each, for 64 elements at once.
#define MR_VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,prefer-vector-width=512")))

struct alignas(64) Fp8Tables {
  uint8_t low[128], high[128];
  uint64_t nan_for_minus_zero;  // all ones or all zeros
};

template <typename Element>
const Fp8Tables& fp8_tables() {
  static const Fp8Tables tables = [] {
    Fp8Tables values{};
    for (uint32_t bits = 0; bits < 128; ++bits) {
      const uint32_t bf16 = float_bits(Element::load(uint8_t(bits))) >> 16;
      values.low[bits] = uint8_t(bf16);
      values.high[bits] = uint8_t(bf16 >> 8);
    }
    values.nan_for_minus_zero = is_nan_bits(float_bits(Element::load(0x80))) ? ~uint64_t(0) : 0;
    return values;
  }();
  return tables;
}

bool can_look_up_fp8() {
  static const bool has_vbmi = __builtin_cpu_supports("avx512vbmi");
  return isa() == Isa::avx512 && has_vbmi;
}

// 64 elements. The first register has 0..3, 16..19, 32..35 and 48..51, the others the next four each: bytes unpack so.
struct Floats64 {
  __m512 part[4];
};

MR_VBMI inline __attribute__((always_inline)) Floats64 look_up(const Fp8Tables& tables, const uint8_t* src) {
  const __m512i in = _mm512_loadu_si512(src), minus_zero = _mm512_set1_epi8(char(0x80)), zero = _mm512_setzero_si512();
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(tables.low), in, _mm512_load_si512(tables.low + 64));
  const __m512i magnitude =
      _mm512_permutex2var_epi8(_mm512_load_si512(tables.high), in, _mm512_load_si512(tables.high + 64));
  const __m512i signed_high = _mm512_or_si512(magnitude, _mm512_and_si512(in, minus_zero));
  const __mmask64 is_nan = _mm512_cmpeq_epi8_mask(in, minus_zero) & tables.nan_for_minus_zero;
  const __m512i high = _mm512_mask_mov_epi8(signed_high, is_nan, _mm512_set1_epi8(0x7f));
  const __m512i bf16[2] = {_mm512_unpacklo_epi8(_mm512_mask_mov_epi8(low, is_nan, _mm512_set1_epi8(char(0xc0))), high),
                           _mm512_unpackhi_epi8(_mm512_mask_mov_epi8(low, is_nan, _mm512_set1_epi8(char(0xc0))), high)};
  return {{_mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, bf16[0])),
           _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, bf16[0])),
           _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, bf16[1])),
           _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, bf16[1]))}};
}

MR_VBMI inline __attribute__((always_inline)) void store_in_order(const Floats64& from, float* dst) {
  const __m512* p = from.part;
  const __m512 first[2] = {_mm512_shuffle_f32x4(p[0], p[1], 0x44), _mm512_shuffle_f32x4(p[2], p[3], 0x44)};
  const __m512 last[2] = {_mm512_shuffle_f32x4(p[0], p[1], 0xee), _mm512_shuffle_f32x4(p[2], p[3], 0xee)};
  _mm512_storeu_ps(dst, _mm512_shuffle_f32x4(first[0], first[1], 0x88));
  _mm512_storeu_ps(dst + 16, _mm512_shuffle_f32x4(first[0], first[1], 0xdd));
  _mm512_storeu_ps(dst + 32, _mm512_shuffle_f32x4(last[0], last[1], 0x88));
  _mm512_storeu_ps(dst + 48, _mm512_shuffle_f32x4(last[0], last[1], 0xdd));
}

MR_VBMI size_t fp8_to_floats(const Fp8Tables& tables, const uint8_t* src, float* dst, size_t count) {
  size_t i = 0;
  for (; i + 64 <= count; i += 64) store_in_order(look_up(tables, src + i), dst + i);
  return i;
}

MR_VBMI size_t fp8_sums(const Fp8Tables& tables, const uint8_t* const (&src)[4], float* dst, size_t count) {
  size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    Floats64 sum = look_up(tables, src[0] + i);
    for (int shard = 1; shard < 4; ++shard) {
      const Floats64 next = look_up(tables, src[shard] + i);
      for (int k = 0; k < 4; ++k) sum.part[k] = _mm512_add_ps(sum.part[k], next.part[k]);
    }
    store_in_order(sum, dst + i);
  }
  return i;
}

// The processor's own conversions of fp16 have the bits of ours, but for the NaN that comes out.
MR_AVX512 size_t fp16_to_floats(const uint16_t* src, float* dst, size_t count) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16)
    _mm512_storeu_ps(dst + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i))));
  return i;
}

MR_AVX512 size_t fp16_from_floats(const float* src, uint16_t* dst, size_t count) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 in = _mm512_loadu_ps(src + i);
    const __mmask16 nan = _mm512_cmp_ps_mask(in, in, _CMP_UNORD_Q);
    const __m256i out = _mm512_cvtps_ph(in, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i one_nan = _mm256_mask_blend_epi16(nan, out, _mm256_set1_epi16(Float16::kNaN));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), one_nan);
  }
  return i;
}

MR_AVX2 size_t fp16_to_floats_avx2(const uint16_t* src, float* dst, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  return i;
}

MR_AVX2 size_t fp16_from_floats_avx2(const float* src, uint16_t* dst, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 in = _mm256_loadu_ps(src + i);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(in, in, _CMP_UNORD_Q));
    const __m128i nan16 = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    const __m128i out = _mm256_cvtps_ph(in, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i one_nan = _mm_blendv_epi8(out, _mm_set1_epi16(Float16::kNaN), nan16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), one_nan);
  }
  return i;
}

// How many of the elements have been converted by the functions above.
template <typename Element>
size_t widened(const typename Element::Storage* src, float* dst, size_t count) {
  if constexpr (__is_same(Element, mr::Element<MR_F16>)) {
    if (isa() == Isa::avx512) return fp16_to_floats(src, dst, count);
    if (isa() == Isa::avx2) return fp16_to_floats_avx2(src, dst, count);
  } else if constexpr (sizeof(typename Element::Storage) == 1 && __is_same(typename Element::Value, float)) {
    if (can_look_up_fp8()) return fp8_to_floats(fp8_tables<Element>(), src, dst, count);
  }
  return 0;
}

template <typename Element>
size_t narrowed(const float* src, typename Element::Storage* dst, size_t count) {
  if constexpr (__is_same(Element, mr::Element<MR_F16>)) {
    if (isa() == Isa::avx512) return fp16_from_floats(src, dst, count);
    if (isa() == Isa::avx2) return fp16_from_floats_avx2(src, dst, count);
  }
  return 0;
}

#else

template <typename Element>
size_t widened(const typename Element::Storage*, float*, size_t) {
  return 0;
}

template <typename Element>
size_t narrowed(const float*, typename Element::Storage*, size_t) {
  return 0;
}

#endif

template <typename Use>
void with_small_float(mr_dtype dtype, const Use& use) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    if constexpr (__is_same(typename Element::Value, float) || __is_same(typename Element::Storage, int8_t))
      use(element);
  });
}

}  // namespace

void to_floats(mr_dtype dtype, const void* src, float* dst, size_t count) {
  with_small_float(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto* in = static_cast<const typename Element::Storage*>(src);
    const size_t done = widened<Element>(in, dst, count);
    run_vectorised<ToFloats<Element>>(in + done, dst + done, count - done);
  });
}

size_t sums_of_four(mr_dtype dtype, const void* const (&shards)[4], float* dst, size_t count) {
  const auto at = [&](auto storage, int shard) { return static_cast<const decltype(storage)*>(shards[shard]); };
  if (dtype == MR_BF16) {
    using Bits = uint16_t;
    run_vectorised<SumFour<Element<MR_BF16>>>(at(Bits(), 0), at(Bits(), 1), at(Bits(), 2), at(Bits(), 3), dst, count);
    return count;
  }
  size_t done = 0;
#ifdef __x86_64__
  if (dtype_size(dtype) != 1 || !can_look_up_fp8()) return 0;
  with_small_float(dtype, [&](auto element) {
    using Element = decltype(element);
    if constexpr (__is_same(typename Element::Storage, uint8_t)) {
      using Bits = uint8_t;
      const uint8_t* const src[4] = {at(Bits(), 0), at(Bits(), 1), at(Bits(), 2), at(Bits(), 3)};
      done = fp8_sums(fp8_tables<Element>(), src, dst, count);
    }
  });
#endif
  return done;
}

void from_floats(mr_dtype dtype, const float* src, void* dst, size_t count) {
  with_small_float(dtype, [&](auto element) {
    using Element = decltype(element);
    auto* out = static_cast<typename Element::Storage*>(dst);
    if constexpr (__is_same(typename Element::Value, float)) {
      const size_t done = narrowed<Element>(src, out, count);
      run_vectorised<FromFloats<Element>>(src + done, out + done, count - done);
    }
  });
}

}  // namespace mr::kernels
