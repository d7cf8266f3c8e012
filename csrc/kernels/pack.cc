#include <algorithm>
#include <vector>

#include "../memory/strided_copy.h"
#include "kernels.h"

namespace mr::kernels {
namespace {

struct Box {
  uint8_t* base;
  View view;
  mr_dtype dtype;
  uint64_t first_byte, first_element;  // of all boxes together

  uint64_t elements() const { return view.bytes() / dtype_size(dtype); }
};

// Calls use(box, begin, end) for what each box has of [begin, end); both count by `first` and `size`.
template <typename First, typename Size, typename Use>
void each_box(const std::vector<Box>& boxes, uint64_t begin, uint64_t end, First first, Size size, const Use& use) {
  const auto after = [&](uint64_t at, const Box& box) { return at < first(box); };
  auto box = std::upper_bound(boxes.begin(), boxes.end(), begin, after);
  for (box -= box != boxes.begin(); box != boxes.end() && first(*box) < end; ++box) {
    const uint64_t from = std::max(begin, first(*box)), to = std::min(end, first(*box) + size(*box));
    if (from < to) use(*box, from, to);
  }
}

constexpr uint64_t kPiece = 1024;  // elements that are converted at a time where they are not one run

// Calls use(where the elements lie, count) for elements [begin, end) of a box: in the box itself where they are one
// run, or in `staging`.
template <typename Use>
void each_piece(const Box& box, uint64_t begin, uint64_t end, const Use& use) {
  const uint64_t size = dtype_size(box.dtype);
  Cursor cursor(box.view, (begin - box.first_element) * size);
  for (uint64_t at = begin; at < end;) {
    const auto run = cursor.peek((end - at) * size);
    const bool direct = run.length >= kPiece * size;
    const uint64_t count = direct ? run.length / size : std::min(kPiece, end - at);
    use(direct ? box.base + run.offset : nullptr, cursor.position(), at, count);
    cursor.seek(cursor.position() + count * size);
    at += count;
  }
}

}  // namespace

struct Boxes::List {
  std::vector<Box> boxes;
  uint64_t bytes = 0, elements = 0;

  template <typename Use>
  void bytes_between(uint64_t begin, uint64_t end, const Use& use) const {
    each_box(
        boxes, begin, end, [](const Box& box) { return box.first_byte; },
        [](const Box& box) { return box.view.bytes(); }, use);
  }

  template <typename Use>
  void elements_between(uint64_t begin, uint64_t end, const Use& use) const {
    each_box(
        boxes, begin, end, [](const Box& box) { return box.first_element; },
        [](const Box& box) { return box.elements(); }, use);
  }
};

Boxes::~Boxes() { delete list_; }

void Boxes::add(void* base, const mr_view& view, mr_dtype dtype) {
  if (list_ == nullptr) list_ = new List();
  Box box{static_cast<uint8_t*>(base), View::from(view), dtype, list_->bytes, list_->elements};
  list_->bytes += box.view.bytes();
  list_->elements += box.elements();
  list_->boxes.push_back(std::move(box));
}

uint64_t Boxes::bytes() const { return list_ == nullptr ? 0 : list_->bytes; }
uint64_t Boxes::elements() const { return list_ == nullptr ? 0 : list_->elements; }

void Boxes::pack(void* packed, uint64_t begin, uint64_t end) const {
  if (list_ == nullptr) return;
  list_->bytes_between(begin, end, [&](const Box& box, uint64_t from, uint64_t to) {
    gather(static_cast<uint8_t*>(packed) + from, box.base, box.view, from - box.first_byte, to - from,
           list_->bytes >= kStreamingBytes);
  });
}

void Boxes::unpack(const void* packed, uint64_t begin, uint64_t end) const {
  if (list_ == nullptr) return;
  list_->bytes_between(begin, end, [&](const Box& box, uint64_t from, uint64_t to) {
    scatter(box.base, box.view, static_cast<const uint8_t*>(packed) + from, from - box.first_byte, to - from,
            list_->bytes >= kStreamingBytes);
  });
}

void Boxes::pack_cast(mr_dtype dtype, void* packed, uint64_t begin, uint64_t end) const {
  if (list_ == nullptr) return;
  list_->elements_between(begin, end, [&](const Box& box, uint64_t from, uint64_t to) {
    alignas(64) uint8_t staging[kPiece * 8];
    each_piece(box, from, to, [&](const uint8_t* direct, uint64_t position, uint64_t at, uint64_t count) {
      if (direct == nullptr) gather(staging, box.base, box.view, position, count * dtype_size(box.dtype), false);
      convert(box.dtype, direct == nullptr ? staging : direct, dtype,
              static_cast<uint8_t*>(packed) + at * dtype_size(dtype), count);
    });
  });
}

void Boxes::unpack_cast(mr_dtype dtype, const void* packed, uint64_t begin, uint64_t end) const {
  if (list_ == nullptr) return;
  list_->elements_between(begin, end, [&](const Box& box, uint64_t from, uint64_t to) {
    alignas(64) uint8_t staging[kPiece * 8];
    each_piece(box, from, to, [&](uint8_t* direct, uint64_t position, uint64_t at, uint64_t count) {
      convert(dtype, static_cast<const uint8_t*>(packed) + at * dtype_size(dtype), box.dtype,
              direct == nullptr ? staging : direct, count);
      if (direct == nullptr) scatter(box.base, box.view, staging, position, count * dtype_size(box.dtype), false);
    });
  });
}

}  // namespace mr::kernels
