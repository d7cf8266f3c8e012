#include "strided_copy.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace mr {
namespace {

// Every copy is between `packed` and `strided`; the direction is a template's parameter.
template <bool kGather>
void move(uint8_t* packed, uint8_t* strided, uint64_t length) {
  std::memcpy(kGather ? packed : strided, kGather ? strided : packed, length);
}

template <bool kGather>
void move_run(uint8_t* packed, uint8_t* strided, uint64_t length, bool streaming, const uint8_t* next) {
  if (streaming && length >= kStreamingRun)
    streaming_copy(kGather ? packed : strided, kGather ? strided : packed, length, kGather ? next : nullptr);
  else
    move<kGather>(packed, strided, length);
}

// Calls use with a short run's length: as a constant, where it is one that elements have.
template <typename Use>
void with_run(uint64_t run, const Use& use) {
  // clang-format off
  switch (run) {
    case 1: return use(std::integral_constant<uint64_t, 1>());
    case 2: return use(std::integral_constant<uint64_t, 2>());
    case 4: return use(std::integral_constant<uint64_t, 4>());
    case 8: return use(std::integral_constant<uint64_t, 8>());
    case 16: return use(std::integral_constant<uint64_t, 16>());
    case 32: return use(std::integral_constant<uint64_t, 32>());
    case 64: return use(std::integral_constant<uint64_t, 64>());
    default: return use(run);
  }
  // clang-format on
}

constexpr uint64_t kShortRun = 256;                 // up to here the way to the next run costs as much as the run
constexpr uint64_t kTileRows = 32, kTileSteps = 8;  // of a transposition, carried out together

// The innermost dimension in one loop; and where the one around it has the smaller steps, as in a transposed matrix,
// some of its rows at a time, so that what is read (or written) of each line of memory is used while it is in the
// cache.
template <bool kGather>
uint64_t move_short_runs(uint8_t* packed, uint8_t* base, const View& view, Cursor& cursor, uint64_t length) {
  const auto& dims = view.dims();
  const size_t last = dims.size() - 1;
  const View::Dim inner = dims[last];
  const uint64_t run = view.run(), row = inner.count * run;
  uint8_t* const at = base + cursor.peek(run).offset;
  const bool transposed = last > 0 && dims[last - 1].stride < inner.stride && cursor.is_at_start_of(last - 1);
  const uint64_t rows = transposed ? std::min({kTileRows, cursor.steps_left(last - 1), length / row}) : 0;
  if (rows > 1) {
    const uint64_t outer_stride = dims[last - 1].stride;
    with_run(run, [&](auto size) {
      for (uint64_t begin = 0; begin < inner.count; begin += kTileSteps)
        for (uint64_t i = 0; i < rows; ++i)
          for (uint64_t j = begin; j < std::min(begin + kTileSteps, inner.count); ++j)
            move<kGather>(packed + i * row + j * size, at + i * outer_stride + j * inner.stride, size);
    });
    cursor.step(last - 1, rows, rows * row);
    return rows * row;
  }
  const uint64_t steps = std::min(cursor.steps_left(last), length / run);
  with_run(run, [&](auto size) {
    for (uint64_t j = 0; j < steps; ++j) move<kGather>(packed + j * size, at + j * inner.stride, size);
  });
  cursor.step(last, steps, steps * run);
  return steps * run;
}

template <bool kGather>
void move_view(uint8_t* packed, uint8_t* base, const View& view, uint64_t begin, uint64_t length, bool streaming) {
  Cursor cursor(view, begin);
  const bool is_short = view.run() <= kShortRun && !view.is_contiguous();
  while (length > 0) {
    uint64_t moved;
    if (is_short && length >= view.run() && cursor.is_at_start_of(view.dims().size() - 1)) {
      moved = move_short_runs<kGather>(packed, base, view, cursor, length);
    } else {
      const auto run = cursor.next(length);
      const uint8_t* const next = run.length < length ? base + cursor.peek(1).offset : nullptr;
      move_run<kGather>(packed, base + run.offset, run.length, streaming, next);
      moved = run.length;
    }
    packed += moved;
    length -= moved;
  }
  if (streaming) finish_streaming();
}

}  // namespace

void gather(uint8_t* packed, const uint8_t* base, const View& view, uint64_t begin, uint64_t length, bool streaming) {
  move_view<true>(packed, const_cast<uint8_t*>(base), view, begin, length, streaming);
}

void scatter(uint8_t* base, const View& view, const uint8_t* packed, uint64_t begin, uint64_t length, bool streaming) {
  move_view<false>(const_cast<uint8_t*>(packed), base, view, begin, length, streaming);
}

#ifdef __SSE2__
namespace {

constexpr uint64_t kLine = 64, kPage = 4096;

// `length`: whole lines; dst at the beginning of one.
void stream_lines(uint8_t* dst, const uint8_t* src, uint64_t length) {
  for (const uint8_t* const end = src + length; src != end; dst += kLine, src += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(src);
    auto* to = reinterpret_cast<__m128i*>(dst);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
}

__attribute__((target("avx2"))) void stream_lines_avx2(uint8_t* dst, const uint8_t* src, uint64_t length) {
  for (const uint8_t* const end = src + length; src != end; dst += kLine, src += kLine) {
    const auto* from = reinterpret_cast<const __m256i*>(src);
    auto* to = reinterpret_cast<__m256i*>(dst);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
  }
}

const auto stream_widest = __builtin_cpu_supports("avx2") ? stream_lines_avx2 : stream_lines;

}  // namespace

void streaming_copy(uint8_t* dst, const uint8_t* src, uint64_t length, const uint8_t* next) {
  if (next != nullptr)
    for (uint64_t at = 0; at < std::min(length, kPage); at += kLine)
      _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T0);
  const uint64_t head = std::min<uint64_t>(-reinterpret_cast<uintptr_t>(dst) % kLine, length);
  std::memcpy(dst, src, head);
  dst += head, src += head, length -= head;
  const uint64_t lines = length / kLine * kLine;
  stream_widest(dst, src, lines);
  std::memcpy(dst + lines, src + lines, length - lines);
}

void finish_streaming() { _mm_sfence(); }  // these stores are not ordered otherwise
#else
void streaming_copy(uint8_t* dst, const uint8_t* src, uint64_t length, const uint8_t*) {
  std::memcpy(dst, src, length);
}
void finish_streaming() {}
#endif

}  // namespace mr
