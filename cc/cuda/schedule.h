// The kernels' work lists: tiles of query rows (forward) or of keys (backward), the heaviest first.
// For the backward kernel the mask is transposed; below, "rows" are what tiles are made of, and
// "columns" the other side.
//
// A traced mask is only known on the device, where one small kernel makes the list before each
// call. A concrete one gets its list on the host, once, when the call is traced: its "plan".

#ifndef JAX_MAGI_CUDA_SCHEDULE_H_
#define JAX_MAGI_CUDA_SCHEDULE_H_

#include <cuda_runtime.h>

#include <vector>

#include "cc/attention.h"

namespace jax_magi::cuda {

// A tile of rows of one slice list, for all heads.
struct alignas(32) Tile {
  int32_t batch;  // 0 where the whole batch shares its slices, and so its tiles.
  int32_t begin, num_rows;
  int32_t num_blocks;              // Blocks of columns that some row sees, over all slices.
  int32_t slice_begin, slice_end;  // All slices that touch the tile lie here.
  int32_t padding[2];
};

// The tiles follow.
struct alignas(32) TileList {
  int32_t num_tiles;
  int32_t padding[7];

  JAX_MAGI_INLINE const Tile* tiles() const { return reinterpret_cast<const Tile*>(this + 1); }
  JAX_MAGI_INLINE Tile* tiles() { return reinterpret_cast<Tile*>(this + 1); }
};

// What a call needs besides: it stands at the workspace's beginning, before the list of a traced
// mask.
struct alignas(32) WorkCounter {
  int32_t next_work;  // Handed out by atomic addition.
  int32_t padding[7];
};

// How a variant of a kernel cuts the score matrix.
struct Tiling {
  int num_rows;     // Of a tile.
  int num_columns;  // Of a block.
  bool by_keys;     // Rows are keys.
};

// A shorter segment between two cuts is left together with its neighbour: many tiny documents
// would each pay for a whole tile.
constexpr int kShortestSegment = 64;

JAX_MAGI_INLINE int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// A divisor of numbers from 0 to 2^31 - 1. A division takes a GPU long, a multiplication does not:
// with `multiplier` = 2^(31 + shift) / divisor, rounded up, the quotient is exact, as the error is
// below 2^-31 of a divisor.
struct Divisor {
  uint32_t divisor, multiplier;
  int shift = 0;

  explicit Divisor(int divisor) : divisor(divisor) {
    while ((int64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
  }
  JAX_MAGI_INLINE int Divide(int a) const {
    return static_cast<int>(static_cast<uint64_t>(a) * multiplier >> (31 + shift));
  }
  JAX_MAGI_INLINE int CeilDivide(int a) const { return Divide(static_cast<int>(a + divisor - 1)); }
};

// Slice `i` as the kernels see it: rows first, and inside the arrays.
JAX_MAGI_INLINE Slice LoadSlice(const Slice* slices, int i, int num_rows, int num_columns,
                                bool by_keys) {
  return ClampSlice(by_keys ? Transpose(slices[i]) : slices[i], num_rows, num_columns);
}

// Fills in the tile's blocks and slices. `slices` are those of its batch element.
JAX_MAGI_INLINE void CountBlocks(const Slice* slices, int num_slices, int num_rows, int num_columns,
                                 bool by_keys, Divisor block_columns, Tile& tile) {
  for (int i = 0; i < num_slices; ++i) {
    const Slice slice = LoadSlice(slices, i, num_rows, num_columns, by_keys);
    const Range rows =
        Intersect({tile.begin, tile.begin + tile.num_rows}, {slice.q_begin, slice.q_end});
    if (rows.begin >= rows.end) continue;
    const Range columns = TouchedKeys(slice, rows);
    if (columns.begin >= columns.end) continue;
    if (tile.num_blocks == 0) tile.slice_begin = i;
    tile.slice_end = i + 1;
    tile.num_blocks += block_columns.CeilDivide(columns.end - columns.begin);
  }
}

inline int NumRows(const AttentionShape& shape, const Tiling& tiling) {
  return static_cast<int>(tiling.by_keys ? shape.k_len : shape.q_len);
}
inline int NumColumns(const AttentionShape& shape, const Tiling& tiling) {
  return static_cast<int>(tiling.by_keys ? shape.q_len : shape.k_len);
}

// Tiles are cut where slices begin and end, so that a packed document costs what it would alone.
inline int64_t MaxTiles(const AttentionShape& shape, const Tiling& tiling) {
  return (shape.shared_slices ? 1 : shape.batch) *
         (CeilDiv(NumRows(shape, tiling), tiling.num_rows) + 2 * shape.num_slices);
}

// Bytes of workspace. Without a plan it holds the list twice: sorted and not.
inline int64_t ScheduleBytes(const AttentionShape& shape, const Tiling& tiling, bool has_plan) {
  const int64_t list = sizeof(TileList) + 2 * MaxTiles(shape, tiling) * sizeof(Tile);
  return sizeof(WorkCounter) + (has_plan ? 0 : list);
}

// The list as words of a TileList, for slices that the whole batch shares.
std::vector<int32_t> MakePlan(const AttentionShape& shape, const Tiling& tiling,
                              const Slice* slices);

// Prepares a call on the stream: resets the counter, fills max_logits with -inf and, without a
// plan, makes the list in the workspace. The kernel after it may start at once, and must wait for
// it with griddepcontrol.wait.
cudaError_t Prepare(const AttentionShape& shape, const Tiling& tiling, const Slice* slices,
                    bool has_plan, void* workspace, float* max_logits, cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SCHEDULE_H_
