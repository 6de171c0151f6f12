// Key tiles whose query heads are shared by several CTAs, in the backward kernel.
//
// A CTA processes one key tile with all query heads of its kv head. If tiles are heavy compared to
// the work of a call, the last of them run alone. If dk and dv are float32, the heads of such tiles
// are split into parts that add their dk and dv to memory. The parts need no workspace, so the
// device may choose them, from a mask that only the device knows.

#ifndef JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_H_
#define JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_H_

#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// The weights of tiles in a list, the heaviest first. Tiles of the last weight are not split.
constexpr int kNumWeights = 4;

// For each weight, the number of parts into which a tile's heads are split, and the number of heads
// per part. The last part may have fewer.
struct HeadCuts {
  uint32_t num_parts[kNumWeights], heads_per_part[kNumWeights];

  explicit HeadCuts(int group) {
    for (int i = 0; i < kNumWeights; ++i) {
      // A part has one head of the heaviest tiles, two heads of tiles that may have half as many
      // blocks, and so on, which balances the parts.
      num_parts[i] = i < kNumWeights - 1 ? CeilDiv(group, 1 << i) : 1;
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

// What determines the weights of tiles, besides their list.
struct TileWeights {
  int num_heads;  // The query heads of all batch elements that a tile applies to.
  int num_sms;

  // The index of the threshold from which on tiles have the first weight. Each further weight
  // begins at half as many blocks.
  //
  // Besides its own blocks, a part takes the time of about 2.5 more: it loads keys, and adds its
  // gradients to memory. If each SM has L blocks of work in parts of S blocks, that is 2.5 L / S
  // for an SM. At the end, an SM waits for the others for about S / 2. The sum is smallest if S^2 =
  // 5 L. Tiles with S / 2 blocks or more are therefore cut into parts of one head. S is at least 8.
  JAX_MAGI_INLINE int FirstThreshold(const TileList& list) const {
    constexpr int kLeast = 4;
    static_assert(ThresholdBlocks(kLeast) == 8, "the least size");
    const int64_t num_blocks = int64_t{list.num_blocks} * num_heads;
    int size = kLeast;
    while (size + 1 < kNumThresholds && IsAtMostBest(ThresholdBlocks(size + 1), num_blocks)) {
      ++size;
    }
    return size - 2;
  }

  // The number of tiles at the front of the list that have this weight or a heavier one.
  JAX_MAGI_INLINE int NumTiles(const TileList& list, int first_threshold, int weight) const {
    if (weight == kNumWeights - 1) return list.num_tiles;
    // A weight below the lowest threshold has no tiles.
    const int threshold = Max(first_threshold - 2 * weight, first_threshold % 2);
    return Clamp(list.num_above[threshold], 0, list.num_tiles);
  }

 private:
  // Whether parts of this size are not larger than the best. The call has `num_blocks` blocks.
  JAX_MAGI_INLINE bool IsAtMostBest(int64_t size, int64_t num_blocks) const {
    return size * size * num_sms <= 5 * num_blocks;
  }
};

inline TileWeights TileWeightsOf(const AttentionShape& shape, int num_sms) {
  const int64_t num_repeats = shape.shared_slices ? shape.batch : 1;
  return {static_cast<int>(shape.num_q_heads * num_repeats), num_sms};
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
