// A fixed order of the additions to dQ, for gradients that are the same in every run: that of the
// tiles in the list.
//
// Each query head and panel of dims has a sum of its own, to whose rows tiles of keys add.
// Queries are counted in units. An addition to some query of a unit is a visit of it, and has its
// turn when all visits by tiles before its own are done. Where none of a unit's queries sees the
// tile, its additions are zeros, of blocks that reach past the queries that do. They are no visits:
// they change nothing, whenever they come, and documents would wait for their neighbours. For the
// same reason a unit in which two documents meet has two parts, each with turns of its own. Nobody
// waits for ever: tiles are handed out in that order, to blocks of threads that run, and the first
// one of those that are not done waits for none.

#ifndef JAX_MAGI_CUDA_ATTENTION_DQ_ORDER_H_
#define JAX_MAGI_CUDA_ATTENTION_DQ_ORDER_H_

#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// How the backward kernel lays its blocks, and the parts of them that are added at once.
struct DqSteps {
  int block_queries, step_queries;
};

// Which part of a unit a tile visits, and how often tiles before it do.
struct DqTurn {
  int part, num_before;

  JAX_MAGI_INLINE int32_t Pack() const { return 2 * num_before + part; }
  JAX_MAGI_INLINE static DqTurn Unpack(int32_t packed) { return {packed & 1, packed >> 1}; }
};
constexpr int32_t kNotVisited = -2;  // As a turn: the first part's, before all others.

struct DqOrder {
  // [tiles of the list, units]: packed; kNotVisited if the tile does not visit the unit.
  int32_t* turns;
  // [2, batch, num_q_heads, num_panels, units]: visits of each part that are done. Null: any order
  // will do.
  int32_t* done;
  int64_t num_counters;         // Of a part.
  int num_units, log2_queries;  // The latter of a unit.

  JAX_MAGI_INLINE bool is_fixed() const { return done != nullptr; }
  JAX_MAGI_INLINE int UnitOf(int query) const { return query >> log2_queries; }
};

// Units are as small as blocks can differ, unless the table would be large. Where any order will
// do, there is nothing of it.
inline DqOrder DqOrderOf(const AttentionShape& shape, const Tiling& tiling, int num_dims,
                         bool is_fixed) {
  DqOrder order{};
  if (!is_fixed) return order;
  static_assert(kPositionAlignment == 8, "blocks of queries begin there");
  order.log2_queries = 3;
  constexpr int64_t kShare = 64;  // Of the sum, for the table.
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

// Words of workspace of both. `done` follows the sum, and has to be filled with zeros as it is, by
// whole vectors of 16 bytes.
inline int64_t NumDqDone(const DqOrder& order) { return (2 * order.num_counters + 3) / 4 * 4; }
inline int64_t NumDqTurns(const AttentionShape& shape, const DqOrder& order, const Tiling& tiling) {
  return MaxTiles(shape, tiling) * order.num_units;
}

// Fills `turns`. The next kernel on the stream may start at once, and must wait for it with
// griddepcontrol.wait.
Status MakeDqOrder(const AttentionShape& shape, const Tiling& tiling, const Slice* slices,
                   const TileList* list, const DqSteps& steps, const DqOrder& order,
                   cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_DQ_ORDER_H_
