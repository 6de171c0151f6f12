// Key tiles whose query heads are shared by several CTAs, in the backward kernel.
//
// A CTA processes one key tile with all query heads of its kv head. If a few tiles hold most of the
// blocks, the last of these tiles run alone. If dk and dv are float32, the heads of such tiles are
// split into parts that add their dk and dv to memory. The parts need no workspace, so the choice
// of tiles may depend on a mask that only the device knows.

#ifndef JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_H_
#define JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_H_

#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// The weight classes of tiles in a list, the heaviest first: one per threshold of TileList, and the
// rest.
constexpr int kNumWeights = kNumThresholds + 1;

// For each weight, the number of parts into which a tile's heads are split, and the number of heads
// per part. The last part may have fewer.
struct HeadCuts {
  uint32_t num_parts[kNumWeights], heads_per_part[kNumWeights];

  explicit HeadCuts(int group) {
    for (int i = 0; i < kNumWeights; ++i) {
      // A part has one head of the heaviest tiles, two heads of tiles that may have half as many
      // blocks, and so on, which balances the parts. The rest is not split. (As thresholds are
      // equal, all tiles that are split belong to the heaviest.)
      num_parts[i] = i < kNumThresholds ? CeilDiv(group, 1 << i) : 1;
      heads_per_part[i] = CeilDiv(group, static_cast<int>(num_parts[i]));
    }
  }
  HeadCuts() = default;
};

// The number of weights whose tiles are split. Each weight has at least as many parts as the next.
inline int NumCutWeights(const HeadCuts& cuts) {
  int count = 0;
  while (cuts.num_parts[count] > 1) ++count;
  return count;
}

// Whether the heads of a call's tiles may be split. Parts are added in any order, and no kernel
// with terms supports it. If the mask is known, the number of parts is chosen when the call is
// traced: see dkv_parts.h.
inline bool CutsHeads(const AttentionCall& call, bool is_mask_known) {
  return call.is_backward && call.has_float_grads && !call.deterministic && !is_mask_known &&
         !call.has_bias && !call.has_alibi && call.shape.num_kv_heads > 0 && call.shape.group() > 1;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_H_
