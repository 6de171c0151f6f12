// Tile sizes of the backward kernel for sm_80 and later.
//
// A warp has 32 keys of a tile. `kSplit` warps share them: each computes the scores of a share of
// the queries, and the gradients of keys and values for a share of the dims. Gradients take
// 2 * (kHeadDim + kValueDim) / kSplit * 32 / 64 registers of a thread, a share of the scores and of
// dP up to 32 each.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_CONFIG_H_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_CONFIG_H_

#include "cc/architecture.h"
#include "cc/cuda/attention/backward_workspace.h"

namespace jax_magi::cuda::sm80 {

// The tile for GPUs with this much shared memory per block: 163 KB or more, or 99 KB.
template <int kHeadDim, int kValueDim, bool kHasSoftcap, bool kHasMuchMemory>
struct BackwardTile;

// Two CTAs run on an SM of Hopper. With one warp per 32 keys, probabilities and dS stay in
// registers; with a cap, there are not enough of them. Shared memory, 97 KB: 16 each for keys and
// values, 8 for each of two stages of queries and of dO, 16 for each of two stages of dS.
template <bool kHasSoftcap, bool kHasMuchMemory>
struct BackwardTile<64, 64, kHasSoftcap, kHasMuchMemory> {
  static constexpr int kGroups = 4, kSplit = kHasSoftcap ? 2 : 1;
  static constexpr int kQStages = 2, kDoStages = 2, kDsStages = 2;
  static constexpr int kMinBlocks = kHasSoftcap ? 1 : 2;
  static constexpr int kMaxSharedBytes = kLeastSharedMemory;
};
// Shared memory, 161 KB: 32 each for keys and values, 16 for each of two stages of queries, dO and
// dS.
template <>
struct BackwardTile<128, 128, false, true> {
  static constexpr int kGroups = 4, kSplit = 2;
  static constexpr int kQStages = 2, kDoStages = 2, kDsStages = 2;
  static constexpr int kMinBlocks = 1;
  static constexpr int kMaxSharedBytes = 163 << 10;
};
// Half as many keys, and one stage of dO: 97 KB.
template <>
struct BackwardTile<128, 128, false, false> {
  static constexpr int kGroups = 2, kSplit = 2;
  static constexpr int kQStages = 2, kDoStages = 1, kDsStages = 2;
  static constexpr int kMinBlocks = 2;
  static constexpr int kMaxSharedBytes = kLeastSharedMemory;
};

// With a cap, the factors of dP take registers, too: four warps share 32 keys.
template <bool kHasMuchMemory>
struct BackwardTile<128, 128, true, kHasMuchMemory> {
  static constexpr int kGroups = 2, kSplit = 4;
  static constexpr int kQStages = 2, kDoStages = 1, kDsStages = 2;
  static constexpr int kMinBlocks = 1;
  static constexpr int kMaxSharedBytes = kLeastSharedMemory;
};

template <int kHeadDim_, int kValueDim_, typename Element_, bool kHasSoftcap_, bool kHasMuchMemory_,
          typename Tile_ = BackwardTile<kHeadDim_, kValueDim_, kHasSoftcap_, kHasMuchMemory_>>
struct BackwardConfig : Tile_ {
  using Element = Element_;
  using Tile = Tile_;
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr bool kHasSoftcap = kHasSoftcap_;
  static constexpr bool kHasTerms = false;
  static constexpr int kWarps = Tile::kGroups * Tile::kSplit, kThreads = 32 * kWarps;
  static constexpr int kKeys = 32 * Tile::kGroups, kQueries = 64;
  // A warp computes the scores of this many queries at a time, kOwnChunks times.
  static constexpr int kChunk = Tile::kSplit == 4 ? 16 : 32;
  static constexpr int kOwnChunks = kQueries / (kChunk * Tile::kSplit);
  // The dims of a warp's dK and dV.
  static constexpr int kKDims = kHeadDim / Tile::kSplit, kVDims = kValueDim / Tile::kSplit;
  // dQ of a block is computed during the next block, so that one barrier a block is enough.
  static constexpr bool kDqIsLate = Tile::kDsStages == 2;
  // For dQ, half of the warps have one half of the queries each, and share the dims.
  static constexpr int kDqQueries = kQueries / 2, kDqDims = kHeadDim / (kWarps / 2);
  static constexpr int kDqPanelDims = DqPanelDims(kHeadDim);
  // Whether queries are the rows of dQ's product, as the layout of the sum asks for: see DqSum.
  static constexpr bool kDqByQuery = kHeadDim > 128;

  static_assert(kOwnChunks == 1 || Tile::kSplit == 1, "a warp has one chunk, or all of them");
  static_assert(kKDims % 32 == 0 && kVDims % 32 == 0, "rows are stored 32 dims at a time");
  static_assert(kDqDims % 16 == 0, "whole pieces of keys");
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_CONFIG_H_
