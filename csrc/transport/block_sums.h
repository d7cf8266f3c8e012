// Checksums of the blocks of a read, made by the threads that copy it as the bytes pass. kernels.h says what they are.
#pragma once

#include "../engine.h"

namespace mr {

class BlockSums {
 public:
  BlockSums() = default;
  explicit BlockSums(const mr_block_sums& wanted) : wanted_(wanted) {}

  bool wanted() const { return wanted_.sums != nullptr; }
  // Before the first of `bytes` moves.
  void clear(uint64_t bytes) const;
  // Copies bytes [begin, begin + length) of the read, and adds them. Several threads may, each other bytes; `begin` is
  // a multiple of 8. `streaming`: past the caches.
  void copy(uint8_t* to, const uint8_t* from, uint64_t begin, uint64_t length, bool streaming) const;
  // Adds those that are there already.
  void add(const uint8_t* bytes, uint64_t begin, uint64_t length) const;

 private:
  template <typename Sum>
  void each_piece(uint64_t begin, uint64_t length, const Sum& sum_of) const;

  mr_block_sums wanted_{};
};

}  // namespace mr
