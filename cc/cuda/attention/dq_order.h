// A fixed order of the additions to dQ, for bitwise reproducible gradients: the order of the tiles
// in the list.
//
// Each query head and panel of dims has its own sum, to whose rows key tiles add. Queries are
// grouped into units. An addition to any query of a unit is a visit of that unit, and its turn
// comes when all visits by earlier tiles are done. Where no query of a unit sees the tile, but a
// query block reaches into the unit, the tile adds zeros. Such additions are not visits: they
// change nothing in any order, and waiting for them would make documents wait for their neighbours.
// For the same reason, a unit in which two documents meet is split into two parts, each with its
// own turns. This cannot deadlock: tiles are handed out in list order, to CTAs that are running,
// and the first unfinished tile waits for no other.

#ifndef JAX_MAGI_CUDA_ATTENTION_DQ_ORDER_H_
#define JAX_MAGI_CUDA_ATTENTION_DQ_ORDER_H_

#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// The backward kernel's query blocks, and the steps in which a block is added.
struct DqSteps {
  int block_queries, step_queries;
};

// Which part of a unit a tile visits, and how many visits of that part by earlier tiles precede it.
struct DqTurn {
  int part, num_before;

  JAX_MAGI_INLINE int32_t Pack() const { return 2 * num_before + part; }
  JAX_MAGI_INLINE static DqTurn Unpack(int32_t packed) { return {packed & 1, packed >> 1}; }
};
constexpr int32_t kNotVisited = -2;  // Unpacks to a turn of the first part before all others.

struct DqOrder {
  // [tiles of the list, units]: packed turns; kNotVisited if the tile does not visit the unit.
  int32_t* turns;
  // [2, batch, num_q_heads, num_panels, units]: the number of finished visits of each part. Null:
  // the order is not fixed.
  int32_t* done;
  int64_t num_counters;         // Per part.
  int num_units, log2_queries;  // log2_queries is the log2 of the queries per unit.

  JAX_MAGI_INLINE bool is_fixed() const { return done != nullptr; }
  JAX_MAGI_INLINE int UnitOf(int query) const { return query >> log2_queries; }
};

// A unit has as many queries as the alignment of query blocks, or more if the table of turns would
// otherwise be too large. Empty if the order is not fixed.
inline DqOrder DqOrderOf(const AttentionShape& shape, const Tiling& tiling, int num_dims,
                         bool is_fixed) {
  DqOrder order{};
  if (!is_fixed) return order;
  static_assert(kPositionAlignment == 8, "blocks of queries begin there");
  order.log2_queries = 3;
  constexpr int64_t kShare = 64;  // The table may take 1 / kShare of the size of the sum.
  const int64_t most = DqSumBytes(shape, num_dims) / kShare;
  const int num_rows = DqSumRows(shape.q_len);
  const auto count = [&] {
    return (num_rows + (1 << order.log2_queries) - 1) >> order.log2_queries;
  };
  while (count() > 1 && MaxTiles(shape, tiling) * count() * 4 > most) ++order.log2_queries;
  order.num_units = count();
  const int num_panels = num_dims / DqPanelDims(num_dims);
  order.num_counters = shape.batch * shape.num_q_heads * num_panels * order.num_units;
  return order;
}

// Workspace words of `done` and of `turns`. `done` follows the sum and is zero-filled together with
// it, in vectors of 16 bytes.
inline int64_t NumDqDone(const DqOrder& order) { return (2 * order.num_counters + 3) / 4 * 4; }
inline int64_t NumDqTurns(const AttentionShape& shape, const DqOrder& order, const Tiling& tiling) {
  return MaxTiles(shape, tiling) * order.num_units;
}

// Fills `turns`. The next kernel on the stream may start at once, and must wait for this one with
// griddepcontrol.wait.
Status MakeDqOrder(const AttentionShape& shape, const Tiling& tiling, const Slice* slices,
                   const TileList* list, const DqSteps& steps, const DqOrder& order,
                   cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_DQ_ORDER_H_
