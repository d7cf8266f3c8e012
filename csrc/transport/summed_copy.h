// Copies within this process that make checksums as the bytes pass.
#pragma once

#include "block_sums.h"
#include "copy_pool.h"

namespace mr {

// Throws MR_CONFIG unless a range of so many bytes begins and ends between words.
void check_block_sums(const mr_block_sums& sums, uint64_t length);

// Returns when done. `to` and `from` do not overlap; `to` null: nothing is copied. On at most so many threads.
void copy_with_sums(uint8_t* to, const uint8_t* from, uint64_t length, uint32_t threads, const BlockSums& sums);

}  // namespace mr
