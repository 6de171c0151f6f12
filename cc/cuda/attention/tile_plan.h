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

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TILE_PLAN_H_
