// checksum: for each block of bytes, a sum of its mixed words, which parts of a block may be added to in any order.

#include <cuda_runtime.h>

#include "device.cuh"

namespace mr {
namespace {

constexpr uint32_t kTileBytes = 8192;  // of one block of bytes, by one warp

__device__ __forceinline__ uint64_t mixed(uint64_t word) {  // splitmix64's finaliser
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

// Little-endian, zero padded after `bytes`.
__device__ __forceinline__ uint64_t word_at(const uint8_t* at, uint64_t bytes) {
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) {
    if (uint64_t(i) < bytes) word |= uint64_t(at[i]) << (8 * i);
  }
  return word;
}

// What the words at `at`, which has number `index` in its block, and after it add to the block's sum.
__device__ __forceinline__ uint64_t term(uint64_t word, uint64_t index) {
  return mixed(word + (index + 1) * 0x9e3779b97f4a7c15u);
}

// A warp for each tile. `wide`: 16-byte accesses are aligned.
__global__ void __launch_bounds__(kThreads)
    checksum(const mr_checksum_args args, uint64_t tiles_of_block, uint64_t tiles, bool wide) {
  const uint64_t warps = all_threads() / warp_size();
  for (uint64_t tile = global_thread() / warp_size(); tile < tiles; tile += warps) {
    const uint64_t block = tile / tiles_of_block;
    const uint64_t within = (tile - block * tiles_of_block) * kTileBytes;  // where the tile begins in its block
    const uint64_t left = args.bytes - block * args.block_bytes;
    const uint64_t size = left < args.block_bytes ? left : args.block_bytes;
    if (within >= size) continue;  // a last block may have fewer tiles
    const uint64_t bytes = size - within < kTileBytes ? size - within : kTileBytes;
    const uint8_t* base = static_cast<const uint8_t*>(args.data) + block * args.block_bytes + within;
    uint64_t sum = within == 0 && lane() == 0 ? mixed(size) : 0;
    uint64_t done = 0;
    if (wide) {
#pragma unroll 4
      for (uint64_t at = uint64_t(lane()) * 16; at + 16 <= bytes; at += uint64_t(warp_size()) * 16) {
        uint64_t word[2];
        load(base + at, word);
        sum += term(word[0], (within + at) / 8) + term(word[1], (within + at) / 8 + 1);
      }
      done = bytes / 16 * 16;
    }
    for (uint64_t at = done + uint64_t(lane()) * 8; at < bytes; at += uint64_t(warp_size()) * 8) {
      sum += term(word_at(base + at, bytes - at), (within + at) / 8);
    }
    sum = across(sum, warp_size(), [](uint64_t a, uint64_t b) { return a + b; });
    if (lane() == 0) atomicAdd(reinterpret_cast<unsigned long long*>(args.sums) + block, sum);
  }
}

}  // namespace
}  // namespace mr

extern "C" int mr_launch_checksum(const mr_checksum_args* args, void* stream) {
  if (args->block_bytes == 0 || args->block_bytes % 8 != 0) return cudaErrorInvalidValue;
  if (args->bytes == 0) return cudaSuccess;
  const auto on = static_cast<cudaStream_t>(stream);
  const uint64_t blocks = args->bytes / args->block_bytes + (args->bytes % args->block_bytes != 0);
  const uint64_t longest = args->bytes < args->block_bytes ? args->bytes : args->block_bytes;
  const uint64_t tiles_of_block = (longest + mr::kTileBytes - 1) / mr::kTileBytes;
  const bool wide = mr::aligned16(args->data) && (blocks == 1 || args->block_bytes % 16 == 0);
  const cudaError_t cleared = cudaMemsetAsync(args->sums, 0, blocks * sizeof(uint64_t), on);
  if (cleared != cudaSuccess) return cleared;
  const uint64_t tiles = blocks * tiles_of_block;
  const unsigned grid = mr::blocks_for(tiles, mr::kMaxWarps / 2);
  mr::checksum<<<grid, mr::kThreads, 0, on>>>(*args, tiles_of_block, tiles, wide);
  return cudaGetLastError();
}
