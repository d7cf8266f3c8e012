#include "view.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace mr {
namespace {

uint64_t checked_mul(uint64_t a, uint64_t b) {
  uint64_t out;
  if (__builtin_mul_overflow(a, b, &out)) throw Error(MR_OUT_OF_BOUNDS, "a view's size overflows 64 bits");
  return out;
}

uint64_t checked_add(uint64_t a, uint64_t b) {
  uint64_t out;
  if (__builtin_add_overflow(a, b, &out)) throw Error(MR_OUT_OF_BOUNDS, "a view's end overflows 64 bits");
  return out;
}

// Is a step of the outer dimension where the inner one would have gone next? The product may leave 64 bits.
bool continues(uint64_t outer_stride, uint64_t stride, uint64_t count) {
  uint64_t next;
  return !__builtin_mul_overflow(stride, count, &next) && next == outer_stride;
}

void check_dims(uint32_t ndim) {
  if (ndim > MR_MAX_DIMS)
    throw Error(MR_CONFIG,
                "a view has " + std::to_string(ndim) + " dimensions, the limit is " + std::to_string(MR_MAX_DIMS));
}

}  // namespace

View View::contiguous(uint64_t offset, uint64_t length) {
  View view;
  view.raw_.offset = offset;
  view.raw_.run = length;
  view.bytes_ = length;
  view.end_ = length == 0 ? 0 : checked_add(offset, length);
  return view;
}

View View::from(const mr_view& raw) {
  check_dims(raw.ndim);
  View view;
  mr_view& out = view.raw_;
  out.offset = raw.offset;
  out.run = raw.run;
  view.bytes_ = raw.run;
  for (uint32_t i = 0; i < raw.ndim; ++i) view.bytes_ = checked_mul(view.bytes_, raw.count[i]);
  if (view.bytes_ == 0) {
    out.run = 0;
    return view;
  }
  uint64_t last = raw.offset;
  for (uint32_t i = 0; i < raw.ndim; ++i) last = checked_add(last, checked_mul(raw.count[i] - 1, raw.stride[i]));
  view.end_ = checked_add(last, raw.run);
  // From the innermost out: a dimension that continues the run, or the dimension inside it, is merged.
  uint64_t count[MR_MAX_DIMS], stride[MR_MAX_DIMS];
  uint32_t n = 0;  // kept so far, innermost first
  for (uint32_t i = raw.ndim; i-- > 0;) {
    if (raw.count[i] == 1) continue;
    if (n == 0 && raw.stride[i] == out.run) {
      out.run *= raw.count[i];
    } else if (n > 0 && continues(raw.stride[i], stride[n - 1], count[n - 1])) {
      count[n - 1] *= raw.count[i];
    } else {
      count[n] = raw.count[i];
      stride[n++] = raw.stride[i];
    }
  }
  out.ndim = n;
  for (uint32_t i = 0; i < n; ++i) {
    out.count[i] = count[n - 1 - i];
    out.stride[i] = stride[n - 1 - i];
  }
  return view;
}

bool View::overlaps_itself() const {
  if (bytes_ == 0) return false;
  uint32_t order[MR_MAX_DIMS];
  std::iota(order, order + raw_.ndim, 0u);
  std::sort(order, order + raw_.ndim, [this](uint32_t a, uint32_t b) { return raw_.stride[a] < raw_.stride[b]; });
  uint64_t extent = raw_.run;  // bytes spanned by the dimensions seen so far; no overflow: end_ was checked
  for (uint32_t i = 0; i < raw_.ndim; ++i) {
    const uint32_t dim = order[i];
    if (raw_.stride[dim] < extent) return true;
    extent += (raw_.count[dim] - 1) * raw_.stride[dim];
  }
  return false;
}

void View::encode(Writer& out) const {
  out.put(raw_.offset).put(raw_.run).put(raw_.ndim);
  for (uint32_t i = 0; i < raw_.ndim; ++i) out.put(raw_.count[i]).put(raw_.stride[i]);
}

View View::decode(Reader& in) {
  mr_view raw{};
  raw.offset = in.get<uint64_t>();
  raw.run = in.get<uint64_t>();
  raw.ndim = in.get<uint32_t>();
  if (raw.ndim > MR_MAX_DIMS) throw Error(MR_PROTOCOL, "a view of " + std::to_string(raw.ndim) + " dimensions");
  for (uint32_t i = 0; i < raw.ndim; ++i) {
    raw.count[i] = in.get<uint64_t>();
    raw.stride[i] = in.get<uint64_t>();
  }
  return from(raw);
}

void Cursor::seek(uint64_t position) {
  const mr_view& v = view_->raw();
  position_ = std::min(position, view_->bytes());
  if (view_->bytes() == 0) return;
  uint64_t run_number = position_ / v.run;
  in_run_ = position_ % v.run;
  run_offset_ = v.offset;
  for (uint32_t i = v.ndim; i-- > 0;) {
    index_[i] = run_number % v.count[i];
    run_number /= v.count[i];
    run_offset_ += index_[i] * v.stride[i];
  }
}

Cursor::Run Cursor::peek(uint64_t limit) const {
  const uint64_t in_this_run = view_->raw().run - in_run_;
  return {run_offset_ + in_run_, std::min({in_this_run, limit, left()})};
}

void Cursor::advance(uint64_t length) {
  const mr_view& v = view_->raw();
  position_ += length;
  in_run_ += length;
  if (in_run_ < v.run || left() == 0) return;
  in_run_ = 0;
  for (uint32_t i = v.ndim; i-- > 0;) {
    run_offset_ += v.stride[i];
    if (++index_[i] < v.count[i]) return;
    run_offset_ -= v.stride[i] * v.count[i];
    index_[i] = 0;
  }
}

void copy_views(void* dst, const View& dst_view, const void* src, const View& src_view, uint64_t begin,
                uint64_t length) {
  Cursor to(dst_view, begin), from(src_view, begin);
  length = std::min({length, to.left(), from.left()});
  while (length > 0) {
    const auto target = to.peek(length);
    const auto source = from.peek(target.length);
    std::memcpy(static_cast<uint8_t*>(dst) + target.offset, static_cast<const uint8_t*>(src) + source.offset,
                source.length);
    to.advance(source.length);
    from.advance(source.length);
    length -= source.length;
  }
}

}  // namespace mr
