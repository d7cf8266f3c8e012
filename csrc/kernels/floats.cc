#include "floats.h"

#include <array>

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

#ifdef __x86_64__

// fp8 by way of bf16, which has every value of it: 256 of them lie in eight registers.
using Table = std::array<uint16_t, 256>;

template <typename Element>
const Table& bf16_of_fp8() {
  static const Table table = [] {
    Table values;
    for (uint32_t bits = 0; bits < 256; ++bits) values[bits] = uint16_t(float_bits(Element::load(uint8_t(bits))) >> 16);
    return values;
  }();
  return table;
}

MR_AVX512 size_t fp8_to_floats(const Table& table, const uint8_t* src, float* dst, size_t count) {
  __m512i part[8];
  for (int i = 0; i < 8; ++i) part[i] = _mm512_loadu_si512(table.data() + 32 * i);
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512i index = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
    const __mmask32 bit6 = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
    const __mmask32 bit7 = _mm512_test_epi16_mask(index, _mm512_set1_epi16(128));
    const __m512i a = _mm512_permutex2var_epi16(part[0], index, part[1]);
    const __m512i b = _mm512_permutex2var_epi16(part[2], index, part[3]);
    const __m512i c = _mm512_permutex2var_epi16(part[4], index, part[5]);
    const __m512i d = _mm512_permutex2var_epi16(part[6], index, part[7]);
    const __m512i low = _mm512_mask_blend_epi16(bit6, a, b), high = _mm512_mask_blend_epi16(bit6, c, d);
    const __m512i bf16 = _mm512_mask_blend_epi16(bit7, low, high);
    const __m512i first = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(bf16)), 16);
    const __m512i second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bf16, 1)), 16);
    _mm512_storeu_si512(dst + i, first);
    _mm512_storeu_si512(dst + i + 16, second);
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
    if (isa() == Isa::avx512) return fp8_to_floats(bf16_of_fp8<Element>(), src, dst, count);
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
