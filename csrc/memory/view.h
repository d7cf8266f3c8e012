// Which bytes of a region, in which order: strided views and walks over their contiguous runs.
#pragma once

#include <cstdint>
#include <vector>

#include "../base/wire.h"

namespace mr {

// A checked mr_view: its total size does not overflow, and neither does its furthest byte.
class View {
 public:
  struct Dim {
    uint64_t count, stride;
  };

  static View contiguous(uint64_t offset, uint64_t length);
  // Merges contiguous dimensions and drops those of count 1. Throws MR_CONFIG where ndim > MR_MAX_DIMS or sizes
  // overflow.
  static View from(const mr_view& raw);

  uint64_t bytes() const { return bytes_; }
  uint64_t offset() const { return offset_; }
  uint64_t run() const { return run_; }  // length of each contiguous run
  bool is_contiguous() const { return dims_.empty(); }
  const std::vector<Dim>& dims() const { return dims_; }  // outermost first
  uint64_t end() const { return end_; }                   // one past the furthest byte; 0 where empty
  bool fits(uint64_t size) const { return end_ <= size; }
  bool overlaps_itself() const;  // two indices reach one byte (conservative: only nested strides pass)
  mr_view raw() const;

  void encode(Writer& out) const;
  static View decode(Reader& in);

 private:
  uint64_t offset_ = 0, run_ = 0, bytes_ = 0, end_ = 0;
  std::vector<Dim> dims_;  // most views have none, and every operation holds two
};

// Cuts a view into views of at most `limit` bytes each, in logical order.
class Parts {
 public:
  Parts(const View& view, uint64_t limit);
  bool done() const { return position_ == view_.bytes(); }
  uint64_t position() const { return position_; }
  View next();  // not when it is done

 private:
  const View view_;
  const uint64_t limit_;
  size_t dim_ = 0;      // that is cut; as many as there are dimensions: the run
  uint64_t inner_ = 1;  // bytes of one index of it
  uint64_t position_ = 0;
};

// Walks the runs of a view from logical byte `position` on.
class Cursor {
 public:
  struct Run {
    uint64_t offset, length;
  };

  explicit Cursor(const View& view, uint64_t position = 0) : view_(&view) { seek(position); }
  void seek(uint64_t position);
  uint64_t position() const { return position_; }
  uint64_t left() const { return view_->bytes() - position_; }
  // The contiguous bytes at the position, at most `limit`; length 0 at the end.
  Run peek(uint64_t limit) const;
  void advance(uint64_t length);  // at most peek().length
  Run next(uint64_t limit) {
    const Run run = peek(limit);
    advance(run.length);
    return run;
  }

  // Whole steps of a dimension, from where all that is inside of it is at its beginning.
  bool is_at_start_of(size_t dim) const;
  uint64_t steps_left(size_t dim) const { return view_->dims()[dim].count - index_[dim]; }
  void step(size_t dim, uint64_t steps, uint64_t bytes);  // at most steps_left, `bytes` together

 private:
  void carry(size_t dim);

  const View* view_;
  uint64_t position_ = 0, run_offset_ = 0, in_run_ = 0;
  uint64_t index_[MR_MAX_DIMS] = {};
};

}  // namespace mr
