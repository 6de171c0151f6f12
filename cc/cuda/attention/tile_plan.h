// The list of tiles of a mask that is known when a call is traced.

#ifndef JAX_MAGI_CUDA_ATTENTION_TILE_PLAN_H_
#define JAX_MAGI_CUDA_ATTENTION_TILE_PLAN_H_

#include <vector>

#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

struct TilePlan {
  std::vector<int32_t> tile_list;  // Words of a TileList.
  int64_t cost = 0;                // An estimate, to compare slices that show the same pairs.
};

// For slices that the whole batch shares.
TilePlan PlanTiles(const AttentionShape& shape, const Tiling& tiling, const Slice* slices);

// Whether tiles have so many blocks that the forward kernel should run in clusters, where it can.
// Two blocks of threads then load half of the keys and values each, but wait for each other at the
// ends of tiles. On an H200, it is worth 4 to 10% with 32 blocks a tile and more (full masks of 4k
// and causal ones of 16k tokens), and costs 2 to 5% with 16 and fewer (causal masks of 4k tokens,
// windows, documents). The backward kernel with additions to dQ in order asks the same, by a
// measure of its own: then few heads at once are better.
bool HasLongTiles(const std::vector<int32_t>& tile_list, bool is_backward);

// Whether the backward kernel should run in clusters, with this list of tiles that are twice as
// long. Two blocks of threads then share one, and load half of the queries each, but both meet all
// that either sees. `tiling` is that of the usual list.
//
// The first of these asks the usual list alone: where it says no, the other list, which takes as
// long to make, need not be there.
bool MayBeBetterInClusters(const std::vector<int32_t>& tile_list);
bool IsBetterInClusters(const Tiling& tiling, const std::vector<int32_t>& tile_list,
                        const std::vector<int32_t>& cluster_list);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TILE_PLAN_H_
