#include "buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "failure.h"

namespace mr::bench {
namespace {

// splitmix64: neighbouring words have nothing in common, so a shifted copy is noticed.
uint64_t pattern_word(uint64_t index, uint64_t seed) {
  uint64_t z = (index + 1) * 0x9e3779b97f4a7c15 + seed;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Calls piece(offset in data, bytes of the pattern, length) for each word that the range meets.
template <typename Piece>
void for_each_word(uint64_t first, uint64_t size, uint64_t seed, Piece piece) {
  for (uint64_t done = 0; done < size;) {
    uint64_t at = first + done, skip = at % 8;
    uint64_t length = std::min<uint64_t>(8 - skip, size - done);
    uint64_t word = pattern_word(at / 8, seed) >> (8 * skip);
    if (!piece(done, &word, length)) return;
    done += length;
  }
}

}  // namespace

Buffer::Buffer(uint64_t size) : size_(size) {
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw_errno("mapping " + std::to_string(size) + " bytes");
  data_ = static_cast<uint8_t*>(mapped);
}

Buffer Buffer::sparse(uint64_t size) { return Buffer(size); }

Buffer Buffer::touched(uint64_t size) {
  Buffer buffer(size);
  std::memset(buffer.data_, 0xA5, size);
  return buffer;
}

Buffer::~Buffer() {
  if (data_) munmap(data_, size_);
}

void fill_pattern(uint8_t* data, uint64_t first, uint64_t size, uint64_t seed) {
  for_each_word(first, size, seed, [&](uint64_t at, const uint64_t* word, uint64_t length) {
    std::memcpy(data + at, word, length);
    return true;
  });
}

std::optional<uint64_t> find_mismatch(const uint8_t* data, uint64_t first, uint64_t size, uint64_t seed) {
  std::optional<uint64_t> wrong;
  for_each_word(first, size, seed, [&](uint64_t at, const uint64_t* word, uint64_t length) {
    const auto* expected = reinterpret_cast<const uint8_t*>(word);
    if (std::memcmp(data + at, expected, length) == 0) return true;
    wrong = at + static_cast<uint64_t>(std::mismatch(data + at, data + at + length, expected).first - (data + at));
    return false;
  });
  return wrong;
}

}  // namespace mr::bench
