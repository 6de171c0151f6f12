// In how many parts the backward kernel computes dk and dv.
//
// A block of threads takes one tile of keys, and the query heads of its kv head. Where there are
// too few tiles for all multiprocessors, the query heads of a group are split among several blocks
// of threads, and each part of dk and dv is summed afterwards. Calls of head_cuts.h have one part.

#ifndef JAX_MAGI_CUDA_ATTENTION_DKV_PARTS_H_
#define JAX_MAGI_CUDA_ATTENTION_DKV_PARTS_H_

#include <vector>

#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// The number, a divisor of the group, with which the call should end first. `tile_list` is that of
// a mask that is known, in words; an empty one stands for a mask that is full or causal. A cluster
// of so many blocks of threads shares a tile. `num_sms` is 0 where there is no device to ask.
int NumDkvParts(const AttentionShape& shape, const Tiling& tiling,
                const std::vector<int32_t>& tile_list, int cluster_size, int num_sms);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_DKV_PARTS_H_
