#include "floats.h"

#include "elements.h"
#include "fp8.h"
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

MR_AVX512 size_t fp16_sums_of_four(const uint16_t* const (&shards)[4], float* dst, size_t count) {
  const auto at = [&](int shard, size_t i) MR_AVX512 {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(shards[shard] + i)));
  };
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 three = _mm512_add_ps(_mm512_add_ps(at(0, i), at(1, i)), at(2, i));
    _mm512_storeu_ps(dst + i, _mm512_add_ps(three, at(3, i)));
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

#endif

// How many of the elements, from the first on, the processor at hand has a quick way for, which has been taken.
template <typename Element>
size_t widened(const typename Element::Storage* src, float* dst, size_t count) {
  if constexpr (kIsFp8<Element>) return Fp8Runs<typename Element::Format>::to_floats(src, dst, count);
#ifdef __x86_64__
  if constexpr (__is_same(Element, mr::Element<MR_F16>)) {
    if (isa() == Isa::avx512) return fp16_to_floats(src, dst, count);
    if (isa() == Isa::avx2) return fp16_to_floats_avx2(src, dst, count);
  }
#endif
  return 0;
}

template <typename Element>
size_t narrowed(const float* src, typename Element::Storage* dst, size_t count) {
  if constexpr (kIsFp8<Element>) return Fp8Runs<typename Element::Format>::from_floats(src, dst, count);
#ifdef __x86_64__
  if constexpr (__is_same(Element, mr::Element<MR_F16>)) {
    if (isa() == Isa::avx512) return fp16_from_floats(src, dst, count);
    if (isa() == Isa::avx2) return fp16_from_floats_avx2(src, dst, count);
  }
#endif
  return 0;
}

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
  size_t done = 0;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto at = [&](int shard) { return static_cast<const typename Element::Storage*>(shards[shard]); };
    if constexpr (kIsFp8<Element>)
      done = Fp8Runs<typename Element::Format>::sums_of_four({at(0), at(1), at(2), at(3)}, dst, count);
#ifdef __x86_64__
    if constexpr (__is_same(Element, mr::Element<MR_F16>))
      if (isa() == Isa::avx512) done = fp16_sums_of_four({at(0), at(1), at(2), at(3)}, dst, count);
#endif
    if constexpr (__is_same(Element, mr::Element<MR_BF16>)) {
      run_vectorised<SumFour<Element>>(at(0), at(1), at(2), at(3), dst, count);
      done = count;
    }
  });
  return done;
}

void from_floats(mr_dtype dtype, const float* src, void* dst, size_t count) {
  with_small_float(dtype, [&](auto element) {
    using Element = decltype(element);
    if constexpr (__is_same(typename Element::Value, float)) {
      auto* out = static_cast<typename Element::Storage*>(dst);
      const size_t done = narrowed<Element>(src, out, count);
      run_vectorised<FromFloats<Element>>(src + done, out + done, count - done);
    }
  });
}

}  // namespace mr::kernels
