// Tiles of keys whose query heads several blocks of threads share, in the backward kernel.
//
// A block of threads takes one tile of keys, and the query heads of its kv head. If a few tiles
// have most of the blocks, the last of them run alone. Where dk and dv are float32, the heads of
// such tiles are cut into parts that add their dk and dv to memory. No part needs a place of its
// own, and which tiles are cut may depend on a mask that only the device knows.

#ifndef JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_H_
#define JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_H_

#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// Tiles of a list by weight, the heaviest first: one for each threshold of TileList, and the rest.
constexpr int kNumWeights = kNumThresholds + 1;

// Into how many parts the heads of a tile are cut, by its weight, and how many heads a part has.
// The last part may have fewer.
struct HeadCuts {
  uint32_t num_parts[kNumWeights], heads_per_part[kNumWeights];

  explicit HeadCuts(int group) {
    for (int i = 0; i < kNumWeights; ++i) {
      // A part has the blocks of one head of the heaviest tiles, of two heads of tiles that may
      // have half as many blocks, and so on. The rest is not cut.
      num_parts[i] = i < kNumThresholds ? CeilDiv(group, 1 << i) : 1;
      heads_per_part[i] = CeilDiv(group, static_cast<int>(num_parts[i]));
    }
  }
  HeadCuts() = default;
};

// Weights whose tiles are cut: each has more parts than the next.
inline int NumCutWeights(const HeadCuts& cuts) {
  int count = 0;
  while (cuts.num_parts[count] > 1) ++count;
  return count;
}

// Whether the heads of a call's tiles may be cut. Parts come in any order, and with terms there is
// no kernel for it. If the mask is known, the number of parts is chosen when the call is traced:
// see dkv_parts.h.
inline bool CutsHeads(const AttentionCall& call, bool is_mask_known) {
  return call.is_backward && call.has_float_grads && !call.deterministic && !is_mask_known &&
         !call.has_bias && !call.has_alibi && call.shape.num_kv_heads > 0 && call.shape.group() > 1;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_H_
