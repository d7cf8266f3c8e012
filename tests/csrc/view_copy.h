// What a transfer between two views has to do, between local memories.
#pragma once

#include <cstring>

#include "memory/view.h"

namespace mr::test {

// Copies bytes [begin, begin + length) of the views' common logical order; both have them.
inline void copy_views(void* dst, const View& dst_view, const void* src, const View& src_view, uint64_t begin,
                       uint64_t length) {
  Cursor to(dst_view, begin), from(src_view, begin);
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

}  // namespace mr::test
