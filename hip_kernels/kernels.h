/* The GPU kernels' launch functions: plain C, one argument struct each, the stream last.

   Every launch function checks its arguments, enqueues its kernels on `stream` (a CUDA or HIP stream) of the current
   device and returns at once: 0, or the runtime's error number (1, "invalid value", for arguments it refuses). Pointers
   are device memory unless a comment says otherwise. dtypes are mr_dtype's numbers (csrc/kernels/float_formats.h).
   What each kernel computes says docs/kernels.md; monarch_rdma/kernels.py has the references. */
#ifndef MONARCH_RDMA_HIP_KERNELS_H
#define MONARCH_RDMA_HIP_KERNELS_H

#include <stdint.h>

#pragma GCC visibility push(default)
#if defined(__cplusplus)
extern "C" {
#endif

/* cffi: begin */
enum { MR_GPU_DIMS = 16, MR_GPU_SHARDS = 128, MR_GPU_RANKS = 16, MR_GPU_BLOCKS = 64 };
enum { MR_GPU_SUM, MR_GPU_AVG, MR_GPU_MIN, MR_GPU_MAX, MR_GPU_PROD };
enum { MR_GPU_ONE_SHOT, MR_GPU_TWO_SHOT, MR_GPU_REDUCE_SCATTER, MR_GPU_ALL_GATHER };

/* --- pack.cu, boxes.cc: strided tensors to and from packed bytes --- */

/* One tensor: runs of bytes that follow each other, at strides. */
typedef struct mr_gpu_part {
  void* data;
  uint64_t run; /* bytes */
  uint32_t ndim;
  uint32_t dtype; /* only where a cast is wanted */
  uint64_t count[MR_GPU_DIMS];
  int64_t stride[MR_GPU_DIMS]; /* bytes */
} mr_gpu_part;

/* What one dimension of a box costs: `count` units, `stride` bytes apart; the rest divides by count without dividing.
 */
typedef struct mr_gpu_dim {
  int64_t stride;
  uint32_t count, multiplier, shift, reserved;
} mr_gpu_dim;

/* A part as the kernel walks it: units of equal size, innermost dimension first. */
typedef struct mr_gpu_box {
  char* part;
  char* packed;
  uint32_t first_tile; /* tiles of the boxes before it */
  uint32_t units;
  uint32_t unit; /* bytes; with a cast, elements */
  uint32_t ndim;
  uint32_t part_dtype, packed_dtype;
  mr_gpu_dim dim[MR_GPU_DIMS + 1];
} mr_gpu_box;

typedef struct mr_boxes_args {
  const mr_gpu_part* parts; /* host memory */
  int64_t nparts;
  void* packed;          /* the parts follow each other from here, in row-major order */
  uint32_t cast;         /* 0: bytes as they are */
  uint32_t packed_dtype; /* with a cast */
  mr_gpu_box* boxes;     /* host memory for `capacity` of them, or NULL to count */
  int64_t capacity;
} mr_boxes_args;

/* Host only. Returns how many boxes the parts need, and lays them out if there is room; *tiles becomes their tiles.
   Returns -1 for more than MR_GPU_DIMS dimensions, runs that are no whole elements, or 2^31 tiles. */
int64_t mr_lay_boxes(const mr_boxes_args* args, uint32_t* tiles);

typedef struct mr_pack_args {
  const mr_gpu_box* host_boxes; /* host memory, from mr_lay_boxes; read before the launch returns */
  mr_gpu_box* boxes;            /* device memory for as many: they are copied here first, on the stream */
  uint32_t nboxes, tiles;
  uint32_t unpack; /* 0: parts to packed; 1: packed to parts */
  uint32_t cast;
} mr_pack_args;
int mr_launch_pack(const mr_pack_args* args, void* stream);

/* --- reduce.cu --- */

typedef struct mr_reduce_args {
  const void* shard[MR_GPU_SHARDS];
  void* out; /* may be one of the shards */
  uint64_t count;
  uint32_t shards, dtype, op, reserved;
} mr_reduce_args;
int mr_launch_reduce(const mr_reduce_args* args, void* stream);

/* --- quantize.cu --- */

typedef struct mr_quantize_args {
  const void* x; /* f32, f16 or bf16 */
  void* q;       /* i8 or one of the four fp8 */
  float* scales; /* one a block */
  float* error;  /* or NULL */
  uint64_t count;
  uint64_t block; /* elements, a multiple of 16 */
  uint32_t x_dtype, q_dtype;
} mr_quantize_args;
int mr_launch_quantize(const mr_quantize_args* args, void* stream);

typedef struct mr_dequantize_args {
  const void* q[MR_GPU_SHARDS];
  const float* scales[MR_GPU_SHARDS];
  void* out; /* f32, f16 or bf16: the sum of the shards, in their order */
  uint64_t count;
  uint64_t block;
  uint32_t shards, q_dtype, out_dtype, reserved;
} mr_dequantize_args;
int mr_launch_dequantize(const mr_dequantize_args* args, void* stream);

/* --- checksum.cu --- */

typedef struct mr_checksum_args {
  const void* data;
  uint64_t bytes;
  uint64_t block_bytes; /* a multiple of 8 */
  uint64_t* sums;       /* one a block */
} mr_checksum_args;
int mr_launch_checksum(const mr_checksum_args* args, void* stream);

/* --- allreduce.cu: over memory that every rank has mapped --- */

/* Where a rank's blocks meet those of the others. Zeroed once, before any rank's first launch. */
typedef struct mr_gpu_signals {
  uint32_t arrived[MR_GPU_BLOCKS][MR_GPU_RANKS];
  uint32_t round[MR_GPU_BLOCKS];
} mr_gpu_signals;

typedef struct mr_collective_args {
  void* data[MR_GPU_RANKS];              /* each rank's data, as it is mapped here; 16-byte aligned */
  mr_gpu_signals* signals[MR_GPU_RANKS]; /* each rank's signals, as they are mapped here */
  void* out;                             /* this rank's result, 16-byte aligned; other memory than its data, which
                                            two-shot alone changes: there it may be the same */
  uint32_t* stop;                        /* device or pinned host memory, 0. The host, or a block that has waited too
                                            long, sets it: this rank's waits end, and out has no defined content */
  uint64_t count;                        /* elements of out (reduce-scatter), of data (all-gather), of both (others) */
  uint64_t patience;                     /* how often a block looks for a rank before it sets *stop; 0: for ever */
  uint32_t kind, rank, ranks, dtype, op;
  uint32_t blocks; /* at most MR_GPU_BLOCKS, the same on all ranks; 0: a fitting number */
} mr_collective_args;
int mr_launch_collective(const mr_collective_args* args, void* stream);
/* cffi: end */

#if defined(__cplusplus)
}
#endif
#pragma GCC visibility pop
#endif
