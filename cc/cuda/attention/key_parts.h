// The forward kernel's last round of tiles, cut along their keys.
//
// Tiles come in rounds, one for each cluster of blocks of threads; the last round may leave most of
// them idle. Where that is worth it, each of its tiles becomes several parts, with a share of its
// blocks each. A part leaves its sums in the workspace; the one that is done last adds up those of
// the tile, always in the same order, and stores it.

#ifndef JAX_MAGI_CUDA_ATTENTION_KEY_PARTS_H_
#define JAX_MAGI_CUDA_ATTENTION_KEY_PARTS_H_

#include "cc/attention.h"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// Of all tiles, as the workspace has room for them: two rounds of the most multiprocessors that a
// Hopper GPU is sold with. With fewer, fewer are used.
constexpr int kMaxParts = 264;
constexpr int kMaxPartsOfTile = 32;

// What they cost, in blocks: the way in and out of each, and the sum.
constexpr int kPartCost = 2, kJoinCost = 2;

// That hold 64 rows of a part.
constexpr int kPartThreads = 128;

// A part's words of 16 bytes for each thread: its accumulator and the state of its rows.
constexpr int PartWords(int value_dim) { return value_dim / 8 + 2; }

// Consumer warpgroups of a kernel, at most.
constexpr int MaxConsumers(int head_dim) { return head_dim == 64 ? 3 : 2; }
constexpr int kMaxPartCounters = MaxConsumers(64) * kMaxParts / 2;
static_assert(kMaxPartCounters % 4 == 0, "parts, which follow, are words of 16 bytes");

// Whether any tile of the call may have enough blocks.
inline bool MayCutKeys(const AttentionShape& shape, const Tiling& tiling) {
  return CeilDiv(NumColumns(shape, tiling), tiling.num_columns) > 2 * kPartCost + kJoinCost;
}

// Where parts lie in the workspace, and counters, of parts of a tile that are done: none where
// there is none.
struct PartsParams {
  int32_t* counters;
  float4* parts;
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_KEY_PARTS_H_
