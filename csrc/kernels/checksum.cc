#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>

#include "../memory/strided_copy.h"
#include "float_formats.h"
#include "kernels.h"
#include "vectorised.h"

namespace mr::kernels {
namespace {

constexpr uint64_t kStep = 0x9e3779b97f4a7c15;
constexpr uint64_t kFactor1 = 0xbf58476d1ce4e5b9, kFactor2 = 0x94d049bb133111eb;
constexpr uint64_t kLine = 64;         // bytes
constexpr uint64_t kPiece = 8u << 10;  // bytes that stay in the nearest cache on their way

// The finaliser of splitmix64: every bit of the word decides about every bit of the result.
MR_HOST_DEVICE uint64_t mixed(uint64_t word) {
  word = (word ^ (word >> 30)) * kFactor1;
  word = (word ^ (word >> 27)) * kFactor2;
  return word ^ (word >> 31);
}

// kCopies: each word goes to `to` as well, once it has been read.
template <bool kCopies>
struct ChecksumLoop {
  MR_HOST_DEVICE static void run(const uint8_t* data, uint8_t* __restrict to, uint64_t bytes, uint64_t first_word,
                                 uint64_t* result) {
    uint64_t sum = 0;
    const uint64_t words = bytes / 8;
    for (uint64_t i = 0; i < words; ++i) {
      uint64_t word;
      memcpy(&word, data + 8 * i, 8);
      if (kCopies) memcpy(to + 8 * i, &word, 8);
      sum += mixed(word + (first_word + i + 1) * kStep);
    }
    if (bytes % 8 != 0) {
      uint64_t word = 0;
      memcpy(&word, data + 8 * words, bytes % 8);
      if (kCopies) memcpy(to + 8 * words, &word, bytes % 8);
      sum += mixed(word + (first_word + words + 1) * kStep);
    }
    *result = sum;
  }
};

#if defined(__x86_64__)
using Line = uint64_t __attribute__((vector_size(kLine)));

// Whole lines, to the beginning of one: mixing costs little while the stores are on their way past the caches.
MR_AVX512 uint64_t stream_lines(uint8_t* to, const uint8_t* data, uint64_t lines, uint64_t first_word) {
  Line step, sum = {};
  for (uint64_t i = 0; i < 8; ++i) step[i] = (first_word + i + 1) * kStep;
  for (uint64_t i = 0; i < lines; ++i) {
    Line words;
    memcpy(&words, data + kLine * i, kLine);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + kLine * i), reinterpret_cast<__m512i>(words));
    words += step;  // and mixed
    words = (words ^ (words >> 30)) * kFactor1;
    words = (words ^ (words >> 27)) * kFactor2;
    sum += words ^ (words >> 31);
    step += 8 * kStep;
  }
  uint64_t total = 0;
  for (uint64_t i = 0; i < 8; ++i) total += sum[i];
  return total;
}
#endif

static_assert(std::endian::native == std::endian::little, "words are little-endian");

}  // namespace

uint64_t checksum(const void* data, uint64_t bytes, uint64_t first_word) {
  uint64_t sum = 0;
  run_vectorised<ChecksumLoop<false>>(static_cast<const uint8_t*>(data), nullptr, bytes, first_word, &sum);
  return sum;
}

uint64_t copy_with_checksum(void* to, const void* data, uint64_t bytes, uint64_t first_word) {
  uint64_t sum = 0;
  run_vectorised<ChecksumLoop<true>>(static_cast<const uint8_t*>(data), static_cast<uint8_t*>(to), bytes, first_word,
                                     &sum);
  return sum;
}

uint64_t stream_with_checksum(void* to, const void* data, uint64_t bytes, uint64_t first_word) {
  auto* target = static_cast<uint8_t*>(to);
  auto* source = static_cast<const uint8_t*>(data);
  uint64_t sum = 0;
#if defined(__x86_64__)
  const uint64_t head = std::min<uint64_t>(-reinterpret_cast<uintptr_t>(target) % kLine, bytes);
  if (isa() == Isa::avx512 && head % 8 == 0) {
    const uint64_t lines = (bytes - head) / kLine, tail = head + lines * kLine;
    sum += copy_with_checksum(target, source, head, first_word);
    sum += stream_lines(target + head, source + head, lines, first_word + head / 8);
    return sum + copy_with_checksum(target + tail, source + tail, bytes - tail, first_word + tail / 8);
  }
#endif
  alignas(kLine) uint8_t passing[kPiece];
  for (uint64_t at = 0; at < bytes; at += kPiece) {
    const uint64_t size = std::min(kPiece, bytes - at);
    sum += copy_with_checksum(passing, source + at, size, first_word + at / 8);
    streaming_copy(target + at, passing, size);
  }
  return sum;
}

uint64_t checksum_start(uint64_t block_bytes) { return mixed(block_bytes); }

}  // namespace mr::kernels
