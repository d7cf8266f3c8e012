// The kernels on the CPU: torch.ops.monarch_rdma and collectives call these. Plain types, no threads of their own, no
// failure: callers check their arguments. Results do not depend on how the work is cut (each call says where it may be
// cut) nor on the processor. docs/kernels.md says what each one computes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../engine.h"
#include "float_formats.h"

#pragma GCC visibility push(default)
namespace mr::kernels {

// Sorted by name in docs and messages: sum avg min max prod.
enum class ReduceOp : uint8_t { sum, avg, min, max, prod };

// avg only for floating types, bool only min and max.
inline bool can_reduce(mr_dtype dtype, ReduceOp op) {
  if (op == ReduceOp::avg) return dtype >= MR_F32 && dtype <= MR_E5M2FNUZ;
  return dtype != MR_BOOL || op == ReduceOp::min || op == ReduceOp::max;
}

// out[i] = op over shards[0][i], shards[1][i], ..., in this order; fp32 (fp64 for fp64) inside of floating types,
// integers wrap around. A NaN goes through every op, and is the canonical one in the result. out may be one of the
// shards (exactly). avg divides by `divisor`, 0: by the number of shards. May be cut anywhere.
void reduce(mr_dtype dtype, ReduceOp op, const void* const* shards, size_t num_shards, void* out, size_t count,
            size_t divisor = 0);

// Elements from one dtype to another as torch's .to() does it (elements.h: converted). May be cut anywhere.
void convert(mr_dtype from, const void* src, mr_dtype to, void* dst, size_t count);

// int8 and the fp8 formats.
inline bool can_quantize_to(mr_dtype dtype) { return dtype == MR_I8 || (dtype >= MR_E4M3FN && dtype <= MR_E5M2FNUZ); }

// Blocks of `block` elements of x (fp32, fp16, bf16), the last one may be shorter: to q (int8 or fp8) and one scale
// each. `error` (may be null) is added to x and becomes what was lost. May be cut between blocks.
void quantize(mr_dtype x_dtype, const void* x, mr_dtype q_dtype, void* q, float* scales, float* error, size_t count,
              size_t block);

// out (fp32, fp16, bf16) = q * its block's scale, rounded. May be cut between blocks.
void dequantize(mr_dtype q_dtype, const void* q, const float* scales, mr_dtype out_dtype, void* out, size_t count,
                size_t block);

// out (fp32) = the sum over shards of q * scale, in the order of shards. May be cut between blocks.
void dequantize_sum(mr_dtype q_dtype, const void* const* qs, const float* const* scales, size_t num_shards, float* out,
                    size_t count, size_t block);

// What a block's words add to its checksum: `bytes` of them from word `first_word` of the block on. Sums (mod 2^64) of
// pieces, cut at multiples of 8 bytes, and of checksum_start are the block's checksum.
uint64_t checksum(const void* data, uint64_t bytes, uint64_t first_word);
uint64_t checksum_start(uint64_t block_bytes);
// The same of bytes that are copied on the way; what is added up is what is stored. They must not overlap.
uint64_t copy_with_checksum(void* to, const void* data, uint64_t bytes, uint64_t first_word);
// And past the caches, as streaming_copy: finish_streaming comes after it.
uint64_t stream_with_checksum(void* to, const void* data, uint64_t bytes, uint64_t first_word);

// Strided boxes, one after the other, to and from one contiguous run of bytes. May be cut anywhere (between elements
// for the functions that convert).
class Boxes {
 public:
  Boxes() = default;
  ~Boxes();
  Boxes(const Boxes&) = delete;
  Boxes& operator=(const Boxes&) = delete;

  void add(void* base, const mr_view& view, mr_dtype dtype);  // dtype: only for the functions that convert
  uint64_t bytes() const;
  uint64_t elements() const;

  // Bytes [begin, end) of all boxes together. `packed` is where byte 0 is.
  void pack(void* packed, uint64_t begin, uint64_t end) const;
  void unpack(const void* packed, uint64_t begin, uint64_t end) const;

  // Elements [begin, end), converted to or from `dtype`. `packed` is where element 0 is.
  void pack_cast(mr_dtype dtype, void* packed, uint64_t begin, uint64_t end) const;
  void unpack_cast(mr_dtype dtype, const void* packed, uint64_t begin, uint64_t end) const;

 private:
  struct List;
  List* list_ = nullptr;
};

}  // namespace mr::kernels
#pragma GCC visibility pop
