#include <string.h>

#include <bit>

#include "float_formats.h"
#include "kernels.h"
#include "vectorised.h"

namespace mr::kernels {
namespace {

constexpr uint64_t kStep = 0x9e3779b97f4a7c15;

// The finaliser of splitmix64: every bit of the word decides about every bit of the result.
MR_HOST_DEVICE uint64_t mixed(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
  return word ^ (word >> 31);
}

struct ChecksumLoop {
  MR_HOST_DEVICE static void run(const uint8_t* data, uint64_t bytes, uint64_t first_word, uint64_t* result) {
    uint64_t sum = 0;
    const uint64_t words = bytes / 8;
    for (uint64_t i = 0; i < words; ++i) {
      uint64_t word;
      memcpy(&word, data + 8 * i, 8);
      sum += mixed(word + (first_word + i + 1) * kStep);
    }
    if (bytes % 8 != 0) {
      uint64_t word = 0;
      memcpy(&word, data + 8 * words, bytes % 8);
      sum += mixed(word + (first_word + words + 1) * kStep);
    }
    *result = sum;
  }
};
static_assert(std::endian::native == std::endian::little, "words are little-endian");

}  // namespace

uint64_t checksum(const void* data, uint64_t bytes, uint64_t first_word) {
  uint64_t sum = 0;
  run_vectorised<ChecksumLoop>(static_cast<const uint8_t*>(data), bytes, first_word, &sum);
  return sum;
}

uint64_t checksum_start(uint64_t block_bytes) { return mixed(block_bytes); }

}  // namespace mr::kernels
