// The forward kernel's work list: query tiles, the heaviest first.

#ifndef JAX_MAGI_CUDA_SCHEDULE_H_
#define JAX_MAGI_CUDA_SCHEDULE_H_

#include <cuda_runtime.h>

#include "cc/attention.h"

namespace jax_magi::cuda {

// A query tile of one batch element, for all heads.
struct alignas(32) QueryTile {
  int32_t batch, q_begin;
  int32_t num_rows;
  int32_t num_blocks;              // Key tiles that some row sees, over all slices.
  int32_t slice_begin, slice_end;  // All slices that touch the tile lie here.
  int32_t padding[2];
};

// What the kernels share in the workspace. `tiles` follow.
struct alignas(32) ScheduleHeader {
  int32_t next_work;  // Handed out by atomic addition.
  int32_t num_tiles;
  int32_t padding[6];
};

// Tiles are cut where slices begin and end, so that a packed document costs what it would alone.
inline int64_t MaxTiles(const AttentionShape& shape, int block_m) {
  return shape.batch * ((shape.q_len + block_m - 1) / block_m + 2 * shape.num_slices);
}

// Bytes of workspace for up to `num_tiles` query tiles: the header, the list, and the list
// unsorted.
inline int64_t ScheduleBytes(int64_t num_tiles) {
  return sizeof(ScheduleHeader) + 2 * num_tiles * sizeof(QueryTile);
}

// Fills the workspace, and max_logits with -inf.
cudaError_t MakeSchedule(const AttentionShape& shape, int block_m, int block_n, const Slice* slices,
                         void* workspace, float* max_logits, cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SCHEDULE_H_
