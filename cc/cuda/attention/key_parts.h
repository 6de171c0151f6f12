// Splitting the forward kernel's last tiles along their keys.
//
// Tiles are processed in rounds, one tile per cluster of CTAs; the last round may leave most
// clusters idle. If it pays, each tile of that round is split into several parts, each with a share
// of its key blocks. A part leaves its partial results in the workspace; the last part of a tile to
// finish reduces them, always in the same order, and stores the result.

#ifndef JAX_MAGI_CUDA_ATTENTION_KEY_PARTS_H_
#define JAX_MAGI_CUDA_ATTENTION_KEY_PARTS_H_

#include "cc/attention.h"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// For all tiles together, as bounded by the workspace: two rounds on 132 SMs, the most that a
// Hopper GPU is sold with. A GPU with fewer SMs uses fewer parts.
constexpr int kMaxParts = 264;
constexpr int kMaxPartsOfTile = 32;

// Estimated costs in key blocks: the prologue and epilogue of each part, and the reduction.
constexpr int kPartCost = 2, kJoinCost = 2;

// Threads that hold 64 rows of a part: one warpgroup.
constexpr int kPartThreads = 128;

// 16-byte words of a part per thread: its accumulator and the state of its rows.
constexpr int PartWords(int value_dim) { return value_dim / 8 + 2; }

// Maximum number of consumer warpgroups of a kernel.
constexpr int MaxConsumers(int head_dim) { return head_dim == 64 ? 3 : 2; }
constexpr int kMaxPartCounters = MaxConsumers(64) * kMaxParts / 2;
static_assert(kMaxPartCounters % 4 == 0, "parts, which follow, are words of 16 bytes");

// Whether any tile of the call may have enough key blocks to be split.
inline bool MayCutKeys(const AttentionShape& shape, const Tiling& tiling) {
  return CeilDiv(NumColumns(shape, tiling), tiling.num_columns) > 2 * kPartCost + kJoinCost;
}

// The parts in the workspace, and the counters of finished parts per tile; both null if no tile can
// be split.
struct PartsParams {
  int32_t* counters;
  float4* parts;
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_KEY_PARTS_H_
