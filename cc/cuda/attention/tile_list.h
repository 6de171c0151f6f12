// The kernels' work lists: tiles of query rows (forward) or of keys (backward), the heaviest first.
// For the backward kernel the mask is transposed; below, "rows" are what tiles are made of, and
// "columns" the other side.
//
// A concrete mask gets its list on the host, once, when the call is traced. A traced one is only
// known on the device, where one small kernel makes the list: an operation of its own, of which XLA
// keeps one for all layers of a program that have the same mask.

#ifndef JAX_MAGI_CUDA_ATTENTION_TILE_LIST_H_
#define JAX_MAGI_CUDA_ATTENTION_TILE_LIST_H_

#include <cuda_runtime.h>

#include "cc/attention.h"
#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/status.h"

namespace jax_magi::cuda {

// A tile of rows of one slice list, for all heads.
struct alignas(32) Tile {
  int32_t batch;  // 0 where the whole batch shares its slices, and so its tiles.
  int32_t begin, num_rows;
  int32_t num_blocks;              // Blocks of columns that some row sees, over all slices.
  int32_t slice_begin, slice_end;  // All slices that touch the tile lie here.
  int32_t index;                   // In the list.
  int32_t padding;

  JAX_MAGI_INLINE Range rows() const { return {begin, begin + num_rows}; }
};

// The tiles follow.
struct alignas(32) TileList {
  int32_t num_tiles;
  int32_t least_blocks;  // Of the last tile.
  int32_t padding[6];

  JAX_MAGI_INLINE const Tile* tiles() const { return reinterpret_cast<const Tile*>(this + 1); }
  JAX_MAGI_INLINE Tile* tiles() { return reinterpret_cast<Tile*>(this + 1); }
};

// What a call needs besides.
struct alignas(32) WorkCounter {
  int32_t next_work;     // Handed out by atomic addition.
  uint32_t next_hidden;  // The same, of queries for which zeros are written.
  int32_t padding[6];
};

// How a variant of a kernel cuts the score matrix.
struct Tiling {
  int num_rows;     // Of a tile.
  int num_columns;  // Of a block.
  bool by_keys;     // Rows are keys.
  // Blocks and tiles of keys begin at multiples of kPositionAlignment: TMA takes boxes of a bias
  // from there alone.
  bool aligns_keys = false;

  // Tells lists of this tiling from others: programs may outlive the build that made their list.
  int32_t stamp() const {
    constexpr int32_t kVersion = 4;  // To be raised when TileList or Tile changes its meaning.
    return ((kVersion * 2 + by_keys) * 1024 + num_rows) * 1024 + aligns_keys * 512 + num_columns;
  }
  // The one with this stamp, if it is of this build: else its own is another.
  static Tiling OfStamp(int32_t stamp) {
    return {stamp >> 10 & 1023, stamp & 511, (stamp >> 20 & 1) != 0, (stamp >> 9 & 1) != 0};
  }
};

// What the stamp of a known list has besides, in multiples of this: about how many blocks all tiles
// have, as the host does not read lists when it launches. A list from the device has 0.
constexpr int32_t kBlocksStamp = 1 << 24;
// Two bits below the leading one, and the exponent.
inline int32_t StampOfBlocks(int64_t num_blocks) {
  int exponent = 0;
  while (num_blocks >> exponent > 1 && exponent < 31) ++exponent;
  const auto bits = static_cast<int32_t>((num_blocks << 2 >> exponent) & 3);
  return (4 * exponent + bits) * kBlocksStamp;
}
inline int64_t BlocksOfStamp(int32_t stamp) {
  const int code = stamp / kBlocksStamp & 127;
  return code == 0 ? 0 : int64_t{4 + code % 4} << code / 4 >> 2;
}

inline int NumRows(const AttentionShape& shape, const Tiling& tiling) {
  return static_cast<int>(tiling.by_keys ? shape.k_len : shape.q_len);
}
inline int NumColumns(const AttentionShape& shape, const Tiling& tiling) {
  return static_cast<int>(tiling.by_keys ? shape.q_len : shape.k_len);
}

JAX_MAGI_INLINE int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Tiles are full, or end where a slice begins or ends.
inline int64_t MaxTiles(const AttentionShape& shape, const Tiling& tiling) {
  return (shape.shared_slices ? 1 : shape.batch) *
         (CeilDiv(NumRows(shape, tiling), tiling.num_rows) + 2 * shape.num_slices);
}

// Of a list that the device makes. It takes twice its size: sorted and not.
inline int64_t TileListBytes(const AttentionShape& shape, const Tiling& tiling) {
  return sizeof(TileList) + 2 * MaxTiles(shape, tiling) * sizeof(Tile);
}

// Slice `i` as the kernels see it: rows first, and inside the arrays.
JAX_MAGI_INLINE Slice LoadSlice(const Slice* slices, int i, int num_rows, int num_columns,
                                bool by_keys) {
  return ClampSlice(by_keys ? Transpose(slices[i]) : slices[i], num_rows, num_columns);
}

// Columns that rows of the tile see by a slice, up to where blocks of them may end: a multiple of
// kPositionAlignment, if that is asked for.
JAX_MAGI_INLINE Range TouchedColumns(const Slice& slice, const Tile& tile, bool aligns_end) {
  const Range rows = Intersect(tile.rows(), {slice.q_begin, slice.q_end});
  Range columns{0, 0};
  if (rows.begin < rows.end) columns = TouchedKeys(slice, rows);
  if (aligns_end && columns.begin < columns.end) columns.end = AlignPosition(columns.end);
  return columns;
}

// Each lets the next kernel on the stream start when the one before it has ended. It must wait for
// this one with griddepcontrol.wait.

// Makes a list, of TileListBytes.
Status MakeTileList(const AttentionShape& shape, const Tiling& tiling, const Slice* slices,
                    TileList* list, cudaStream_t stream);

// Resets the counter and those of parts, which follow it, and fills max_logits, unless they are
// null, with -inf.
Status ResetWork(const AttentionShape& shape, WorkCounter* counter, int num_part_counters,
                 float* max_logits, cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TILE_LIST_H_
