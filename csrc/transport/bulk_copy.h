// Copies between two views of memory that this process can address, cut in pieces that several threads may carry out.
#pragma once

#include "../memory/view.h"
#include "block_sums.h"

namespace mr {

class BulkCopy {
 public:
  BulkCopy() = default;
  // The views outlive it. Contiguous ranges may overlap, with the result of memmove; strided ones must not.
  // `one_of_many`: which together do not stay in a cache. `sums`: are made of contiguous ranges on the way; outlives
  // it.
  BulkCopy(uint8_t* dst, const View& dst_view, const uint8_t* src, const View& src_view, bool one_of_many,
           const BlockSums* sums = nullptr);

  // Its pieces must be carried out one after the other, in the order of `begin`.
  bool in_order() const { return overlap_ != Overlap::none; }
  void copy(uint64_t begin, uint64_t length) const;

 private:
  void copy_strided(uint64_t begin, uint64_t length) const;  // both views are strided

  enum class Overlap : uint8_t { none, forward, backward };

  uint8_t* dst_ = nullptr;
  const uint8_t* src_ = nullptr;
  const View* dst_view_ = nullptr;
  const View* src_view_ = nullptr;
  const BlockSums* sums_ = nullptr;
  Overlap overlap_ = Overlap::none;
  bool contiguous_ = false, streaming_ = false;
};

}  // namespace mr
