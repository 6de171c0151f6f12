// Makes the tile list of a mask that is known when a call is traced.

#ifndef JAX_MAGI_CUDA_ATTENTION_TILE_PLAN_H_
#define JAX_MAGI_CUDA_ATTENTION_TILE_PLAN_H_

#include <vector>

#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

struct TilePlan {
  std::vector<int32_t> tile_list;  // A TileList, as words.
  int64_t cost = 0;  // The estimated run time, to compare slices that cover the same pairs.
};

// `slices` is one list that the whole batch shares.
TilePlan PlanTiles(const AttentionShape& shape, const Tiling& tiling, const Slice* slices);

// The total number of blocks of all tiles.
int64_t NumBlocks(const std::vector<int32_t>& tile_list);

// Whether the backward kernel should run in clusters, with a list whose tiles are twice as long.
// Two CTAs then share a tile and load half of the queries each, but both process every block that
// either of them sees. `tiling` is that of the usual list.
//
// The first function needs only the usual list: if it returns false, the cluster list, which takes
// as long to make, is not needed.
bool MayBeBetterInClusters(const std::vector<int32_t>& tile_list);
bool IsBetterInClusters(const Tiling& tiling, const std::vector<int32_t>& tile_list,
                        const std::vector<int32_t>& cluster_list);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TILE_PLAN_H_
