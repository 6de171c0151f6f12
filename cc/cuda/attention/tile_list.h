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

// Thresholds by which tiles are told heavy from light, in blocks: 16, 8 and 4. See head_cuts.h.
//
// A block takes about 3 us with 128 dims, and a tile 2 us besides, to load keys and add gradients:
// of an item of 16 blocks that is 4%. Under a usual window tiles have 8 to 30 blocks.
constexpr int kNumThresholds = 3;
constexpr int ThresholdBlocks(int i) { return 16 >> i; }

// What a list is made for. It serves no call of other lengths, slices or tiles.
struct ListKey {
  int32_t stamp;      // Of the tiling.
  int32_t num_lists;  // Slice lists: one for each batch element, or one for all.
  int32_t num_slices, num_rows, num_columns;

  JAX_MAGI_INLINE bool operator==(const ListKey& other) const {
    return stamp == other.stamp && num_lists == other.num_lists && num_slices == other.num_slices &&
           num_rows == other.num_rows && num_columns == other.num_columns;
  }
};

// The tiles follow.
struct alignas(32) TileList {
  int32_t num_tiles;
  int32_t least_blocks;  // Of the last tile.
  // Tiles at the front that have so many blocks or more; 0 in a list that was made on the host.
  int32_t num_above[kNumThresholds];
  ListKey key;
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

// Whose kernels a list is for.
enum class Architecture : int32_t { kNone = 0, kSm90 = 1 };

// How a variant of a kernel cuts the score matrix.
struct Tiling {
  Architecture architecture;
  int num_rows;     // Of a tile.
  int num_columns;  // Of a block, a multiple of 16.
  bool by_keys;     // Rows are keys.
  // Blocks and tiles of keys begin at multiples of kPositionAlignment: TMA takes boxes of a bias
  // from there alone.
  bool aligns_keys = false;

  // Tells lists of this tiling from others: programs may outlive the build that made their list.
  int32_t stamp() const {
    constexpr int32_t kVersion = 6;  // To be raised when TileList or Tile changes its meaning.
    static_assert(kVersion < 8, "what follows in a stamp is the number of blocks");
    return kVersion << 21 | by_keys << 20 | num_rows << 10 |
           static_cast<int32_t>(architecture) << 6 | aligns_keys << 5 | num_columns / 16;
  }
  // The one with this stamp, if it is of this build: else its own is another.
  static Tiling OfStamp(int32_t stamp) {
    return {static_cast<Architecture>(stamp >> 6 & 15), stamp >> 10 & 1023, (stamp & 31) * 16,
            (stamp >> 20 & 1) != 0, (stamp >> 5 & 1) != 0};
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

inline int NumLists(const AttentionShape& shape) {
  return shape.shared_slices ? 1 : static_cast<int>(shape.batch);
}

inline ListKey KeyOf(const AttentionShape& shape, const Tiling& tiling) {
  return {tiling.stamp(), NumLists(shape), static_cast<int32_t>(shape.num_slices),
          NumRows(shape, tiling), NumColumns(shape, tiling)};
}

// Tiles are full, or end where a slice begins or ends.
inline int64_t MaxTiles(const AttentionShape& shape, const Tiling& tiling) {
  return NumLists(shape) *
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

// Moves a tile into the arrays, whatever it says: what it is read from may not be a list.
JAX_MAGI_INLINE void ClampTile(int num_lists, int num_rows, int num_slices, Tile& tile) {
  tile.batch = Clamp(tile.batch, 0, num_lists - 1);
  tile.begin = Clamp(tile.begin, 0, num_rows);
  tile.num_rows = Clamp(tile.num_rows, 0, num_rows - tile.begin);
  tile.slice_begin = Max(tile.slice_begin, 0);
  tile.slice_end = Min(tile.slice_end, num_slices);
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

// A call's list, and what it has to be made for. Null: there is none to check.
struct ListCheck {
  const TileList* list;
  ListKey key;
  int32_t max_tiles;

#ifdef __CUDACC__
  // Ends the program if the list is another call's, as it would end if we were wrong elsewhere: a
  // call has no way to say so when it runs. For one thread of a kernel before the one that works.
  __device__ __forceinline__ void Check() const {
    if (list == nullptr) return;
    const bool is_own = list->key == key && 0 <= list->num_tiles && list->num_tiles <= max_tiles;
    if (!is_own) __trap();
  }
#endif
};

// Resets the counter and those of parts, which follow it, and fills max_logits, unless they are
// null, with -inf. Checks the list.
Status ResetWork(const AttentionShape& shape, const ListCheck& check, WorkCounter* counter,
                 int num_part_counters, float* max_logits, cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TILE_LIST_H_
