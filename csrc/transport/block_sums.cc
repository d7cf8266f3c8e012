#include "block_sums.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../kernels/kernels.h"
#include "../memory/strided_copy.h"

namespace mr {

void BlockSums::clear(uint64_t bytes) const {
  const uint64_t first = wanted_.first / wanted_.block_bytes;
  const uint64_t end = (wanted_.first + bytes + wanted_.block_bytes - 1) / wanted_.block_bytes;
  std::memset(wanted_.sums, 0, (1 + end - first) * sizeof(uint64_t));
}

// Pieces end where blocks do. `sum_of(at, size, word)`: of the read's bytes from `at` on, word `word` of their block.
template <typename Sum>
void BlockSums::each_piece(uint64_t begin, uint64_t length, const Sum& sum_of) const {
  const uint64_t block = wanted_.block_bytes, end = begin + length, first_block = wanted_.first / block;
  while (begin < end) {
    const uint64_t place = wanted_.first + begin, number = place / block, within = place % block;
    const uint64_t piece_end = std::min(begin + block - within, end);
    uint64_t sum = sum_of(begin, piece_end - begin, within / 8);
    if (within == 0) sum += kernels::checksum_start(std::min(block, wanted_.total - place));
    std::atomic_ref(wanted_.sums[1 + number - first_block]).fetch_add(sum, std::memory_order_relaxed);
    begin = piece_end;
  }
  std::atomic_ref(wanted_.sums[0]).fetch_add(length, std::memory_order_relaxed);
}

void BlockSums::copy(uint8_t* to, const uint8_t* from, uint64_t begin, uint64_t length, bool streaming) const {
  each_piece(begin, length, [&](uint64_t at, uint64_t size, uint64_t word) {
    uint8_t* const target = to + (at - begin);
    const uint8_t* const source = from + (at - begin);
    return streaming ? kernels::stream_with_checksum(target, source, size, word)
                     : kernels::copy_with_checksum(target, source, size, word);
  });
  if (streaming) finish_streaming();
}

void BlockSums::add(const uint8_t* bytes, uint64_t begin, uint64_t length) const {
  each_piece(begin, length, [&](uint64_t at, uint64_t size, uint64_t word) {
    return kernels::checksum(bytes + (at - begin), size, word);
  });
}

}  // namespace mr
