// Memory to move, and the pattern that tells whether the right bytes arrived.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

namespace mr::bench {

// Private anonymous pages, as malloc and torch give for large sizes.
class Buffer {
 public:
  Buffer() = default;
  // Touched pages are resident before anything is measured; untouched ones are sparse.
  static Buffer touched(uint64_t size);
  static Buffer sparse(uint64_t size);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer();

  uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  explicit Buffer(uint64_t size);
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  uint8_t* data_ = nullptr;
  uint64_t size_ = 0;
};

// Byte i of the pattern depends on the seed and i alone; data points at byte `first` of it.
void fill_pattern(uint8_t* data, uint64_t first, uint64_t size, uint64_t seed);
// Index of the first byte that differs.
std::optional<uint64_t> find_mismatch(const uint8_t* data, uint64_t first, uint64_t size, uint64_t seed);

}  // namespace mr::bench
