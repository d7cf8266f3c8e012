#include "strided_copy.h"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace mr {
namespace {

void copy_run(uint8_t* to, const uint8_t* from, uint64_t length, bool streaming) {
  if (streaming && length >= kStreamingRun)
    streaming_copy(to, from, length);
  else
    std::memcpy(to, from, length);
}

}  // namespace

void gather(uint8_t* packed, const uint8_t* base, const View& view, uint64_t begin, uint64_t length, bool streaming) {
  Cursor cursor(view, begin);
  while (length > 0) {
    const auto run = cursor.next(length);
    copy_run(packed, base + run.offset, run.length, streaming);
    packed += run.length;
    length -= run.length;
  }
}

void scatter(uint8_t* base, const View& view, const uint8_t* packed, uint64_t begin, uint64_t length, bool streaming) {
  Cursor cursor(view, begin);
  while (length > 0) {
    const auto run = cursor.next(length);
    copy_run(base + run.offset, packed, run.length, streaming);
    packed += run.length;
    length -= run.length;
  }
}

#ifdef __SSE2__
void streaming_copy(uint8_t* dst, const uint8_t* src, uint64_t length) {
  constexpr uint64_t kLine = 64;
  const uint64_t head = std::min<uint64_t>(-reinterpret_cast<uintptr_t>(dst) % kLine, length);
  std::memcpy(dst, src, head);
  dst += head, src += head, length -= head;
  for (; length >= kLine; dst += kLine, src += kLine, length -= kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(src);
    auto* to = reinterpret_cast<__m128i*>(dst);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  _mm_sfence();  // these stores are not ordered otherwise: what follows says that the bytes are there
  std::memcpy(dst, src, length);
}
#else
void streaming_copy(uint8_t* dst, const uint8_t* src, uint64_t length) { std::memcpy(dst, src, length); }
#endif

}  // namespace mr
