// Copies between the bytes of a view, in its order, and contiguous memory.
#pragma once

#include "view.h"

namespace mr {

// Bytes [begin, begin + length) of the view of `base`, to and from `packed`. They must not overlap. `streaming`: long
// runs go round the caches, for copies that would not stay there.
void gather(uint8_t* packed, const uint8_t* base, const View& view, uint64_t begin, uint64_t length, bool streaming);
void scatter(uint8_t* base, const View& view, const uint8_t* packed, uint64_t begin, uint64_t length, bool streaming);

// memcpy with non-temporal stores: the destination does not pass through the caches. Before another thread is told that
// the bytes are there, the one that stored them calls finish_streaming.
// `next`: where as many bytes will be read afterwards, or null: no prefetcher follows a stride of pages.
void streaming_copy(uint8_t* dst, const uint8_t* src, uint64_t length, const uint8_t* next = nullptr);
void finish_streaming();

// From here on a copy does not stay in a cache anyway, and stores that go round it spare the read of each destination
// line: 26 GB/s instead of 21 for 64 MiB where this was measured (libc's memcpy in one piece); below, caches win.
constexpr uint64_t kStreamingBytes = MR_BULK_BYTES;
constexpr uint64_t kStreamingPart = 64u << 10;  // one of many that together are so large
constexpr uint64_t kStreamingRun = 2048;        // shorter runs of a strided copy go through the caches

}  // namespace mr
