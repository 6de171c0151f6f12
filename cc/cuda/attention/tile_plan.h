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

// That all tiles have.
int64_t NumBlocks(const std::vector<int32_t>& tile_list);

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
