// The kernels' work lists: tiles of query rows (forward) or of keys (backward), the heaviest first.
// The backward kernel uses the transposed mask. Below, "rows" are what a tile consists of, and
// "columns" are the other side, which a kernel processes in blocks.
//
// The list of a known mask is made on the host, once, when the call is traced. A traced mask is
// known only on the device, where one small kernel makes the list, or the lists of several calls at
// once. That kernel is a separate operation, so XLA keeps a single copy for all layers of a program
// that have the same mask.

#ifndef JAX_MAGI_CUDA_ATTENTION_TILE_LIST_H_
#define JAX_MAGI_CUDA_ATTENTION_TILE_LIST_H_

#include <cuda_runtime.h>

#include <vector>

#include "cc/attention.h"
#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/status.h"

namespace jax_magi::cuda {

// A tile of rows of one slice list, for all heads.
struct alignas(32) Tile {
  int32_t batch;  // 0 if the whole batch shares its slices, and therefore its tiles.
  int32_t begin, num_rows;
  int32_t num_blocks;              // Column blocks that some row sees, summed over all slices.
  int32_t slice_begin, slice_end;  // A range that contains all slices that touch the tile.
  int32_t index;                   // Position in the list.
  int32_t is_marked;               // Whether a row is in a slice without columns.

  JAX_MAGI_INLINE Range rows() const { return {begin, begin + num_rows}; }
};

// Numbers of blocks that classify tiles by weight: 2, 3, 4, 6, 8, 12 and so on, up to 96. See
// head_cuts.h.
constexpr int kNumThresholds = 12;
JAX_MAGI_INLINE constexpr int ThresholdBlocks(int i) { return (2 + i % 2) << i / 2; }

// Which tiles without blocks a list lacks: all their rows are left to other calls.
enum class Lacks : int32_t {
  kNothing,
  kEmpty,     // All of them. The call has the results of earlier calls, which it leaves unchanged.
  kUnmarked,  // Those without a row in a slice without columns. Other calls write all such tiles.
};

// What a list was made for. The list is not valid for other lengths, slices or tilings.
struct ListKey {
  int32_t stamp;      // Identifies the tiling.
  int32_t num_lists;  // Number of slice lists: one per batch element, or one for all.
  int32_t num_slices, num_rows, num_columns;
  Lacks lacks = Lacks::kNothing;  // Forward lists only.

  JAX_MAGI_INLINE bool operator==(const ListKey& other) const {
    return stamp == other.stamp && num_lists == other.num_lists && num_slices == other.num_slices &&
           num_rows == other.num_rows && num_columns == other.num_columns && lacks == other.lacks;
  }
};

// The header of a list; the tiles follow it in memory.
struct alignas(32) TileList {
  int32_t num_tiles;
  int32_t least_blocks;  // Number of blocks of the last tile.
  // Number of blocks of all tiles, and number of tiles at the front with ThresholdBlocks(i) blocks
  // or more; 0 in a list made on the host.
  int32_t num_blocks;
  int32_t num_above[kNumThresholds];
  ListKey key;
  int32_t padding[3];

  JAX_MAGI_INLINE const Tile* tiles() const { return reinterpret_cast<const Tile*>(this + 1); }
  JAX_MAGI_INLINE Tile* tiles() { return reinterpret_cast<Tile*>(this + 1); }
};

// The counters from which CTAs fetch work, besides the list.
struct alignas(32) WorkCounter {
  int32_t next_work;     // The next work number, fetched by atomic addition.
  uint32_t next_hidden;  // The same for the queries whose hidden pairs are filled with zeros.
  int32_t padding[6];
};

// How a variant of a kernel cuts the score matrix.
struct Tiling {
  Architecture architecture;  // Whose kernels a list is for.
  int num_rows;               // Rows per tile.
  int num_columns;            // Columns per block, a multiple of 16.
  bool by_keys;               // Whether rows are keys (backward) rather than queries.
  // Whether key blocks and key tiles begin at multiples of kPositionAlignment, as TMA requires to
  // load boxes of a bias.
  bool aligns_keys = false;

  // Distinguishes lists of this tiling from others: a compiled program may outlive the build that
  // made its list.
  int32_t stamp() const {
    constexpr int32_t kVersion = 7;  // Raise this when the meaning of TileList or Tile changes.
    static_assert(kVersion < 8, "what follows in a stamp is the number of blocks");
    return kVersion << 21 | by_keys << 20 | num_rows << 10 |
           static_cast<int32_t>(architecture) << 6 | aligns_keys << 5 | num_columns / 16;
  }
  // The tiling with this stamp, if this build made the stamp; otherwise the result has a different
  // stamp.
  static Tiling OfStamp(int32_t stamp) {
    return {static_cast<Architecture>(stamp >> 6 & 15), stamp >> 10 & 1023, (stamp & 31) * 16,
            (stamp >> 20 & 1) != 0, (stamp >> 5 & 1) != 0};
  }
};

// The stamp of a known list also encodes, in multiples of this, the approximate number of blocks of
// all tiles, because the host does not read the list when it launches. A list made on the device
// has 0 there.
constexpr int32_t kBlocksStamp = 1 << 24;
// Encodes the exponent and the two bits below the leading one.
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

// A tile is full, or it ends where a slice begins or ends.
inline int64_t MaxTiles(const AttentionShape& shape, const Tiling& tiling) {
  return NumLists(shape) *
         (CeilDiv(NumRows(shape, tiling), tiling.num_rows) + 2 * shape.num_slices);
}

// Bytes of a list that the device makes. It holds the tiles twice: sorted and unsorted.
inline int64_t TileListBytes(const AttentionShape& shape, const Tiling& tiling) {
  return sizeof(TileList) + 2 * MaxTiles(shape, tiling) * sizeof(Tile);
}

// Slice `i` as the kernels use it: rows first, and clamped to the arrays.
JAX_MAGI_INLINE Slice LoadSlice(const Slice* slices, int i, int num_rows, int num_columns,
                                bool by_keys) {
  return ClampSlice(by_keys ? Transpose(slices[i]) : slices[i], num_rows, num_columns);
}

// Clamps any tile to the arrays: the memory that it was read from may not be a valid list.
JAX_MAGI_INLINE void ClampTile(int num_lists, int num_rows, int num_slices, Tile& tile) {
  tile.batch = Clamp(tile.batch, 0, num_lists - 1);
  tile.begin = Clamp(tile.begin, 0, num_rows);
  tile.num_rows = Clamp(tile.num_rows, 0, num_rows - tile.begin);
  tile.slice_begin = Max(tile.slice_begin, 0);
  tile.slice_end = Min(tile.slice_end, num_slices);
}

// The columns that rows of the tile see through a slice. If `aligns_end`, the end is rounded up to
// a multiple of kPositionAlignment, where blocks end.
JAX_MAGI_INLINE Range TouchedColumns(const Slice& slice, const Tile& tile, bool aligns_end) {
  const Range rows = Intersect(tile.rows(), {slice.q_begin, slice.q_end});
  Range columns{0, 0};
  if (rows.begin < rows.end) columns = TouchedKeys(slice, rows);
  if (aligns_end && columns.begin < columns.end) columns.end = AlignPosition(columns.end);
  return columns;
}

// Each of these lets the next kernel on the stream start once the previous one has ended. The next
// kernel must wait for this one with griddepcontrol.wait.

// A list to be made by the device.
struct ListRequest {
  AttentionShape shape;  // Only batch, lengths and the number of slices are used.
  Tiling tiling;
  const Slice* slices;
  int slice_stride;  // From the first slice of a batch element to that of the next.
  Lacks lacks;
  TileList* list;  // TileListBytes(shape, tiling) bytes.
};

// Makes all lists in one launch, unless their numbers of slices are so different that they need
// different kernels.
Status MakeTileLists(const std::vector<ListRequest>& requests, cudaStream_t stream);

// A call's list, and the key that it must have. A null list is not checked.
struct ListCheck {
  const TileList* list;
  ListKey key;
  int32_t max_tiles;
  bool may_lack_empty;  // Whether a list that lacks all empty tiles serves the call, too.

#ifdef __CUDACC__
  // Ends the program if the list belongs to a different call, like any other broken assumption: a
  // running kernel has no way to return an error. Called by one thread of a kernel that precedes
  // the attention kernel.
  __device__ __forceinline__ void Check() const {
    if (list == nullptr) return;
    ListKey found = list->key;
    if (may_lack_empty || found.lacks == Lacks::kUnmarked) found.lacks = Lacks::kNothing;
    const bool is_own = found == key && 0 <= list->num_tiles && list->num_tiles <= max_tiles;
    if (!is_own) __trap();
  }
#endif
};

// Resets the work counter and the part counters that follow it, and fills max_logits with -inf
// unless it is null. Checks the list.
Status ResetWork(const AttentionShape& shape, const ListCheck& check, WorkCounter* counter,
                 int num_part_counters, float* max_logits, cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TILE_LIST_H_
