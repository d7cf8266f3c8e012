#include "view.h"

#include <algorithm>
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
  view.offset_ = offset;
  view.run_ = view.bytes_ = length;
  view.end_ = length == 0 ? 0 : checked_add(offset, length);
  return view;
}

View View::from(const mr_view& raw) {
  check_dims(raw.ndim);
  View view;
  view.offset_ = raw.offset;
  view.run_ = view.bytes_ = raw.run;
  for (uint32_t i = 0; i < raw.ndim; ++i) view.bytes_ = checked_mul(view.bytes_, raw.count[i]);
  if (view.bytes_ == 0) {
    view.run_ = 0;
    return view;
  }
  uint64_t last = raw.offset;
  for (uint32_t i = 0; i < raw.ndim; ++i) last = checked_add(last, checked_mul(raw.count[i] - 1, raw.stride[i]));
  view.end_ = checked_add(last, raw.run);
  // From the innermost out: a dimension that continues the run, or the dimension inside it, is merged.
  std::vector<Dim>& kept = view.dims_;
  for (uint32_t i = raw.ndim; i-- > 0;) {
    const Dim dim{raw.count[i], raw.stride[i]};
    if (dim.count == 1) continue;
    if (kept.empty() && dim.stride == view.run_)
      view.run_ *= dim.count;
    else if (!kept.empty() && continues(dim.stride, kept.back().stride, kept.back().count))
      kept.back().count *= dim.count;
    else
      kept.push_back(dim);
  }
  std::reverse(kept.begin(), kept.end());
  return view;
}

bool View::overlaps_itself() const {
  if (bytes_ == 0) return false;
  std::vector<Dim> by_stride = dims_;
  std::sort(by_stride.begin(), by_stride.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  uint64_t extent = run_;  // bytes spanned by the dimensions seen so far; no overflow: end_ was checked
  for (const Dim& dim : by_stride) {
    if (dim.stride < extent) return true;
    extent += (dim.count - 1) * dim.stride;
  }
  return false;
}

mr_view View::raw() const {
  mr_view out{};
  out.offset = offset_;
  out.run = run_;
  for (const Dim& dim : dims_) {
    out.count[out.ndim] = dim.count;
    out.stride[out.ndim++] = dim.stride;
  }
  return out;
}

void View::encode(Writer& out) const {
  out.put(offset_).put(run_).put(static_cast<uint32_t>(dims_.size()));
  for (const Dim& dim : dims_) out.put(dim.count).put(dim.stride);
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
  const auto& dims = view_->dims();
  position_ = std::min(position, view_->bytes());
  if (view_->bytes() == 0) return;
  uint64_t run_number = position_ / view_->run();
  in_run_ = position_ % view_->run();
  run_offset_ = view_->offset();
  for (size_t i = dims.size(); i-- > 0;) {
    index_[i] = run_number % dims[i].count;
    run_number /= dims[i].count;
    run_offset_ += index_[i] * dims[i].stride;
  }
}

Cursor::Run Cursor::peek(uint64_t limit) const {
  const uint64_t in_this_run = view_->run() - in_run_;
  return {run_offset_ + in_run_, std::min({in_this_run, limit, left()})};
}

void Cursor::advance(uint64_t length) {
  const auto& dims = view_->dims();
  position_ += length;
  in_run_ += length;
  if (in_run_ < view_->run() || left() == 0) return;
  in_run_ = 0;
  run_offset_ += dims.back().stride;
  ++index_[dims.size() - 1];
  carry(dims.size() - 1);
}

bool Cursor::is_at_start_of(size_t dim) const {
  for (size_t i = dim + 1; i < view_->dims().size(); ++i)
    if (index_[i] != 0) return false;
  return in_run_ == 0;
}

void Cursor::step(size_t dim, uint64_t steps, uint64_t bytes) {
  position_ += bytes;
  if (left() == 0) return;
  run_offset_ += steps * view_->dims()[dim].stride;
  index_[dim] += steps;
  carry(dim);
}

void Cursor::carry(size_t dim) {
  const auto& dims = view_->dims();
  for (; index_[dim] == dims[dim].count; --dim) {
    run_offset_ -= dims[dim].stride * dims[dim].count;
    index_[dim] = 0;
    run_offset_ += dims[dim - 1].stride;
    ++index_[dim - 1];
  }
}

Parts::Parts(const View& view, uint64_t limit) : view_(view), limit_(std::max<uint64_t>(limit, 1)) {
  dim_ = view_.dims().size();
  if (view_.run() > limit_) return;
  inner_ = view_.run();
  while (dim_ > 0) {
    --dim_;
    if (const uint64_t count = view_.dims()[dim_].count; inner_ > limit_ / count) return;
    if (dim_ > 0) inner_ *= view_.dims()[dim_].count;
  }
}

View Parts::next() {
  const auto& dims = view_.dims();
  const bool cuts_run = dim_ == dims.size();
  const uint64_t whole = cuts_run ? view_.run() : dims[dim_].count * inner_;
  const uint64_t length = std::min(limit_ / inner_ * inner_, whole - position_ % whole);
  const uint64_t offset = Cursor(view_, position_).peek(1).offset;
  position_ += length;
  if (cuts_run) return View::contiguous(offset, length);
  mr_view part{offset, view_.run(), 0, {}, {}};
  for (size_t i = dim_; i < dims.size(); ++i, ++part.ndim) {
    part.count[part.ndim] = i == dim_ ? length / inner_ : dims[i].count;
    part.stride[part.ndim] = dims[i].stride;
  }
  return View::from(part);
}

}  // namespace mr
