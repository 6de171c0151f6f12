// The number of parts in which the backward kernel computes dk and dv.
//
// A CTA processes one key tile with all query heads of its kv head. If there are too few tiles for
// all SMs, the query heads of a group are split among several CTAs, and the parts of dk and dv are
// summed afterwards. Calls that use head_cuts.h have one part.

#ifndef JAX_MAGI_CUDA_ATTENTION_DKV_PARTS_H_
#define JAX_MAGI_CUDA_ATTENTION_DKV_PARTS_H_

#include <vector>

#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// Returns the divisor of the group size with the shortest estimated time. `tile_list` holds the
// words of the list of a known mask; if it is empty, the mask is assumed to be full or causal.
// `cluster_size` CTAs share a tile. `num_sms` is 0 if there is no device to query.
int NumDkvParts(const AttentionShape& shape, const Tiling& tiling,
                const std::vector<int32_t>& tile_list, int cluster_size, int num_sms);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_DKV_PARTS_H_
