#include "run.h"

#include <atomic>

namespace mr::ops {
namespace {

// A box for each part, with their dtypes where they are cast.
void fill(kernels::Boxes& boxes, const Packing& packing) {
  for (size_t i = 0; i < packing.parts.size(); ++i) {
    const TensorBytes& part = packing.parts[i];
    boxes.add(part.base, part.view, packing.cast ? packing.dtypes[i] : MR_U8);
  }
}

float* floats(const TensorBytes& bytes) { return reinterpret_cast<float*>(bytes.base); }

// work(first block, first element, elements) for ranges of blocks of `count` elements.
template <typename Work>
void in_ranges_of_blocks(uint64_t count, uint64_t block, uint64_t bytes_per_element, const Work& work) {
  in_ranges((count + block - 1) / block, block * bytes_per_element, [&](uint64_t begin, uint64_t end) {
    work(begin, begin * block, std::min(end * block, count) - begin * block);
  });
}

}  // namespace

void check_place(const Tensor& tensor, const char* argument) {
  STD_TORCH_CHECK(tensor.is_cpu(), argument, " must be a CPU tensor");
}

void run_pack(const Packing& packing) {
  kernels::Boxes boxes;
  fill(boxes, packing);
  char* packed = packing.packed.base;
  if (packing.cast) {
    in_ranges(boxes.elements(), dtype_size(packing.packed_dtype),
              [&](uint64_t begin, uint64_t end) { boxes.pack_cast(packing.packed_dtype, packed, begin, end); });
  } else {
    in_ranges(boxes.bytes(), 1, [&](uint64_t begin, uint64_t end) { boxes.pack(packed, begin, end); });
  }
}

void run_unpack(const Packing& packing) {
  kernels::Boxes boxes;
  fill(boxes, packing);
  const char* packed = packing.packed.base;
  if (packing.cast) {
    in_ranges(boxes.elements(), dtype_size(packing.packed_dtype),
              [&](uint64_t begin, uint64_t end) { boxes.unpack_cast(packing.packed_dtype, packed, begin, end); });
  } else {
    in_ranges(boxes.bytes(), 1, [&](uint64_t begin, uint64_t end) { boxes.unpack(packed, begin, end); });
  }
}

void run_reduce(mr_dtype dtype, kernels::ReduceOp op, const std::vector<TensorBytes>& shards, const TensorBytes& out) {
  const uint64_t size = dtype_size(dtype);
  in_ranges(out.total / size, size * (shards.size() + 1), [&](uint64_t begin, uint64_t end) {
    std::vector<const void*> from;
    for (const TensorBytes& shard : shards) from.push_back(shard.base + begin * size);
    kernels::reduce(dtype, op, from.data(), from.size(), out.base + begin * size, end - begin);
  });
}

void run_quantize(mr_dtype x_dtype, const TensorBytes& x, mr_dtype q_dtype, const TensorBytes& q,
                  const TensorBytes& scales, const TensorBytes& error, uint64_t block) {
  const uint64_t size = dtype_size(x_dtype);
  in_ranges_of_blocks(q.total, block, size + 1, [&](uint64_t first, uint64_t begin, uint64_t count) {
    kernels::quantize(x_dtype, x.base + begin * size, q_dtype, q.base + begin, floats(scales) + first,
                      error.base != nullptr ? floats(error) + begin : nullptr, count, block);
  });
}

void run_dequantize(mr_dtype q_dtype, const TensorBytes& q, const TensorBytes& scales, mr_dtype out_dtype,
                    const TensorBytes& out, uint64_t block) {
  const uint64_t size = dtype_size(out_dtype);
  in_ranges_of_blocks(q.total, block, size + 1, [&](uint64_t first, uint64_t begin, uint64_t count) {
    kernels::dequantize(q_dtype, q.base + begin, floats(scales) + first, out_dtype, out.base + begin * size, count,
                        block);
  });
}

void run_dequantize_sum(mr_dtype q_dtype, const std::vector<TensorBytes>& qs, const std::vector<TensorBytes>& scales,
                        const TensorBytes& out, uint64_t block) {
  in_ranges_of_blocks(out.total / 4, block, 4 + qs.size(), [&](uint64_t first, uint64_t begin, uint64_t count) {
    std::vector<const void*> q;
    std::vector<const float*> scale;
    for (const TensorBytes& shard : qs) q.push_back(shard.base + begin);
    for (const TensorBytes& shard : scales) scale.push_back(floats(shard) + first);
    kernels::dequantize_sum(q_dtype, q.data(), scale.data(), q.size(), floats(out) + begin, count, block);
  });
}

void run_checksum(const TensorBytes& bytes, uint64_t block, const TensorBytes& out) {
  auto* sums = reinterpret_cast<uint64_t*>(out.base);
  for (uint64_t i = 0; i < out.total / 8; ++i) {
    sums[i] = kernels::checksum_start(std::min(block, bytes.total - i * block));
  }
  // Threads may meet in a block: what each adds to it is a sum as well.
  in_ranges((bytes.total + 7) / 8, 8, [&](uint64_t first_word, uint64_t last_word) {
    const uint64_t end = std::min(last_word * 8, bytes.total);
    for (uint64_t at = first_word * 8; at < end;) {
      const uint64_t i = at / block, size = std::min(end, (i + 1) * block) - at;
      std::atomic_ref(sums[i]).fetch_add(kernels::checksum(bytes.base + at, size, (at - i * block) / 8),
                                         std::memory_order_relaxed);
      at += size;
    }
  });
}

void run_peer_collective(const PeerCollective&) {
  STD_TORCH_CHECK(false, "peer_collective is for tensors of a GPU; monarch_rdma.collectives has it for the CPU's");
}

}  // namespace mr::ops
