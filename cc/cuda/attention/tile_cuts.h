// How rows are cut into tiles, when host or device makes a list.

#ifndef JAX_MAGI_CUDA_ATTENTION_TILE_CUTS_H_
#define JAX_MAGI_CUDA_ATTENTION_TILE_CUTS_H_

#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// A divisor of numbers from 0 to 2^31 - 1. Multiplication is much faster than division on a GPU:
// with `multiplier` = 2^(31 + shift) / divisor, rounded up, the quotient is exact, because the
// error is below 2^-31 of a divisor.
struct Divisor {
  uint32_t divisor, multiplier;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(int divisor) : divisor(divisor) {
    while ((int64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
  }
  JAX_MAGI_INLINE int Divide(int a) const {
    return static_cast<int>(static_cast<uint64_t>(a) * multiplier >> (31 + shift));
  }
  JAX_MAGI_INLINE int CeilDivide(int a) const { return Divide(static_cast<int>(a + divisor - 1)); }
};

// What is to be cut, and the tiling.
struct CutArgs {
  int num_lists;  // Number of slice lists: one per batch element, or one for all.
  int num_rows, num_columns, num_slices;
  bool by_keys;
  // Whether tiles and blocks begin at multiples of kPositionAlignment.
  bool aligns_rows, aligns_columns;
  Divisor tile_rows, block_columns;
  Divisor candidates_per_list;  // Candidates for cuts: row 0, and both ends of each slice.
  const Slice* slices;
  int slice_stride;  // From the first slice of a list to that of the next; num_slices at first.

  CutArgs() = default;
  CutArgs(const AttentionShape& shape, const Tiling& tiling, const Slice* slices)
      : num_lists(NumLists(shape)),
        num_rows(NumRows(shape, tiling)),
        num_columns(NumColumns(shape, tiling)),
        num_slices(static_cast<int>(shape.num_slices)),
        by_keys(tiling.by_keys),
        aligns_rows(tiling.by_keys && tiling.aligns_keys),
        aligns_columns(tiling.by_keys || tiling.aligns_keys),
        tile_rows(tiling.num_rows),
        block_columns(tiling.num_columns),
        candidates_per_list(static_cast<int>(2 * shape.num_slices + 1)),
        slices(slices),
        slice_stride(num_slices) {}

  JAX_MAGI_INLINE const Slice* list(int batch) const {
    return slices + int64_t{batch} * slice_stride;
  }
  JAX_MAGI_INLINE int64_t num_candidates() const {
    return int64_t{num_lists} * candidates_per_list.divisor;
  }
};

// The rows between two cuts, and the tiles they are divided into.
struct Segment {
  int batch, begin, end;
  int first_tile, num_tiles;
};

// The row of a list's candidate `index` for a cut: 0 for the first, then both ends of each slice,
// rounded down if rows are aligned. 0 also stands for no cut.
JAX_MAGI_INLINE int CutRow(const CutArgs& args, const Slice* slices, int index) {
  if (index == 0) return 0;
  const Slice slice =
      LoadSlice(slices, (index - 1) / 2, args.num_rows, args.num_columns, args.by_keys);
  if (slice.q_begin >= slice.q_end || slice.k_begin >= slice.k_end) return 0;
  const int row = (index - 1) % 2 ? slice.q_end : slice.q_begin;
  if (row >= args.num_rows) return 0;
  return args.aligns_rows ? row / kPositionAlignment * kPositionAlignment : row;
}

// Whether a cut is made at `row`, where `previous` is the candidate before it. A shorter segment
// stays joined to its neighbour: many tiny documents would each pay for a whole tile.
JAX_MAGI_INLINE bool IsCutKept(int previous, int row) {
  constexpr int kShortestSegment = 64;
  return row - previous >= kShortestSegment;
}

JAX_MAGI_INLINE Slice LoadSlice(const CutArgs& args, const Tile& tile, int s) {
  return LoadSlice(args.list(tile.batch), s, args.num_rows, args.num_columns, args.by_keys);
}

// Columns that rows of the tile see through slice `s` of its list, up to the aligned end of the
// last block.
JAX_MAGI_INLINE Range TouchedColumns(const CutArgs& args, const Tile& tile, int s) {
  return TouchedColumns(LoadSlice(args, tile, s), tile, args.aligns_columns);
}

// The same, without the padding for alignment.
JAX_MAGI_INLINE Range SeenColumns(const CutArgs& args, const Tile& tile, int s) {
  return TouchedColumns(LoadSlice(args, tile, s), tile, /*aligns_end=*/false);
}

// Tile `i` of the list, which lies in `segment`: its rows, its slices, and the number of its
// blocks. Only every `step`-th slice is considered, from `first` on.
JAX_MAGI_INLINE Tile CutTile(const CutArgs& args, const Segment& segment, int i, int first = 0,
                             int step = 1) {
  Tile tile{};
  const int most_rows = static_cast<int>(args.tile_rows.divisor);
  tile.batch = segment.batch;
  tile.begin = segment.begin + (i - segment.first_tile) * most_rows;
  tile.num_rows = Min(most_rows, segment.end - tile.begin);
  for (int s = first; s < args.num_slices; s += step) {
    const Slice slice = LoadSlice(args, tile, s);
    if (slice.k_begin >= slice.k_end) {
      const Range marked = Intersect(tile.rows(), {slice.q_begin, slice.q_end});
      if (marked.begin < marked.end) tile.is_marked = 1;
    }
    const Range columns = TouchedColumns(slice, tile, args.aligns_columns);
    if (columns.begin >= columns.end) continue;
    if (tile.num_blocks == 0) tile.slice_begin = s;
    tile.slice_end = s + 1;
    tile.num_blocks += args.block_columns.CeilDivide(columns.end - columns.begin);
  }
  return tile;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TILE_CUTS_H_
