// Memory with known bytes, fast enough for large sizes under the sanitizers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace mr::test {

constexpr uint64_t kMiB = 1u << 20;
#ifdef __SANITIZE_THREAD__
constexpr uint64_t kLarge = 12 * kMiB, kLong = 24 * kMiB;  // a copy by several threads; one that can be stopped
#else
constexpr uint64_t kLarge = 64 * kMiB, kLong = 128 * kMiB;
#endif

// Byte i of seed's pattern is noise[(i + 977 * seed) % size]: no period that a wrong offset could hide behind.
inline const std::vector<uint8_t>& noise() {
  static const std::vector<uint8_t> bytes = [] {
    std::mt19937 random(1);
    std::vector<uint8_t> out(1000003);
    for (auto& byte : out) byte = static_cast<uint8_t>(random() >> 9);
    return out;
  }();
  return bytes;
}
template <typename Piece>  // bool piece(uint64_t at, const uint8_t* noise, uint64_t length)
bool each_piece(uint64_t from, uint64_t length, uint64_t seed, Piece piece) {
  for (uint64_t at = 0; at < length;) {
    const uint64_t begin = (from + at + 977 * seed) % noise().size(),
                   here = std::min(length - at, noise().size() - begin);
    if (!piece(at, noise().data() + begin, here)) return false;
    at += here;
  }
  return true;
}
inline void paint(uint8_t* to, uint64_t length, uint64_t seed) {
  each_piece(0, length, seed, [to](uint64_t at, const uint8_t* noise, uint64_t n) {
    std::memcpy(to + at, noise, n);
    return true;
  });
}
inline bool painted(const uint8_t* here, uint64_t length, uint64_t seed, uint64_t from = 0) {
  return each_piece(from, length, seed, [here](uint64_t at, const uint8_t* noise, uint64_t n) {
    return std::memcmp(here + at, noise, n) == 0;
  });
}
inline bool all(const uint8_t* at, uint64_t length, uint8_t value) {
  return length == 0 || (at[0] == value && std::memcmp(at, at + 1, length - 1) == 0);
}

}  // namespace mr::test
