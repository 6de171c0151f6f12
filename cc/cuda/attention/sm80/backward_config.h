// Tile sizes of the backward kernel for sm_80 and later.
//
// A warp has 16 * kPieces keys of a tile. `kSplit` warps share them: each computes the scores of a
// share of the queries, and the gradients of keys and values for a share of the dims. Gradients
// take (kHeadDim + kValueDim) / kSplit * kPieces / 2 registers of a thread, a share of the scores
// and of dP up to 32 each. With roles, kSplit warps of each role share the keys of the scores, and
// the role's warps share the gradients: see backward_roles.cuh.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_CONFIG_H_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_CONFIG_H_

#include "cc/architecture.h"
#include "cc/cuda/attention/backward_workspace.h"

namespace jax_magi::cuda::sm80 {

// What most tiles have in common.
struct UsualBackwardTile {
  static constexpr int kPieces = 2;
  static constexpr int kQueries = 64;
  static constexpr int kRegisterDims = 0;  // This many dims of values stay in registers.
  static constexpr int kMinBlocks = 1;
  static constexpr bool kHasRoles = false;  // See backward_roles.cuh.
  static constexpr int kDqShares = 2;       // Warps of a share have the same queries of dQ.
  static constexpr int kMaxSharedBytes = kLeastSharedMemory;
};

// The tile for GPUs with this much shared memory per block: 163 KB or more, or 99 KB.
template <int kHeadDim, int kValueDim, bool kHasSoftcap, bool kHasMuchMemory>
struct BackwardTile;

// Two CTAs run on an SM of Hopper. With one warp per 32 keys, probabilities and dS stay in
// registers; with a cap, there are not enough of them. Shared memory, 97 KB: 16 each for keys and
// values, 8 for each of two stages of queries and of dO, 16 for each of two stages of dS.
template <bool kHasSoftcap, bool kHasMuchMemory>
struct BackwardTile<64, 64, kHasSoftcap, kHasMuchMemory> : UsualBackwardTile {
  static constexpr int kGroups = 4, kSplit = kHasSoftcap ? 2 : 1;
  static constexpr int kQStages = 2, kDoStages = 2, kDsStages = 2;
  static constexpr int kMinBlocks = kHasSoftcap ? 1 : 2;
};
// Shared memory, 161 KB: 32 each for keys and values, 16 for each of two stages of queries, dO and
// dS.
template <>
struct BackwardTile<128, 128, false, true> : UsualBackwardTile {
  static constexpr int kGroups = 4, kSplit = 2;
  static constexpr int kQStages = 2, kDoStages = 2, kDsStages = 2;
  static constexpr int kMaxSharedBytes = 163 << 10;
};
// Half as many keys, and one stage of dO: 97 KB.
template <>
struct BackwardTile<128, 128, false, false> : UsualBackwardTile {
  static constexpr int kGroups = 2, kSplit = 2;
  static constexpr int kQStages = 2, kDoStages = 1, kDsStages = 2;
  static constexpr int kMinBlocks = 2;
};

// With a cap, the factors of dP take registers, too: four warps share 32 keys.
template <bool kHasMuchMemory>
struct BackwardTile<128, 128, true, kHasMuchMemory> : UsualBackwardTile {
  static constexpr int kGroups = 2, kSplit = 4;
  static constexpr int kQStages = 2, kDoStages = 1, kDsStages = 2;
};

// Shared memory, 97 KB: 24 for keys, 16 for values, as much for queries and dO, and 8 for each of
// two stages of dS.
template <bool kHasSoftcap>
struct BackwardTile<192, 128, kHasSoftcap, false> : UsualBackwardTile {
  static constexpr int kGroups = 2, kSplit = 4;
  static constexpr int kQStages = 1, kDoStages = 1, kDsStages = 2;
};
// Two stages of queries and dO: 137 KB.
template <bool kHasSoftcap>
struct BackwardTile<192, 128, kHasSoftcap, true> : UsualBackwardTile {
  static constexpr int kGroups = 2, kSplit = 4;
  static constexpr int kQStages = 2, kDoStages = 2, kDsStages = 2;
  static constexpr int kMaxSharedBytes = 163 << 10;
};

// Four warps of each role. Shared memory, 145 KB: 32 each for keys, values, queries and dO, and 8
// each for probabilities and dS.
template <bool kHasSoftcap>
struct BackwardTile<256, 256, kHasSoftcap, true> : UsualBackwardTile {
  static constexpr bool kHasRoles = true;
  static constexpr int kGroups = 2, kSplit = 2;
  static constexpr int kQStages = 1, kDoStages = 1, kDsStages = 2;
  static constexpr int kMaxSharedBytes = 163 << 10;
};
// Half as many queries, and a quarter of the values in registers: 97 KB.
template <bool kHasSoftcap>
struct BackwardTile<256, 256, kHasSoftcap, false> : UsualBackwardTile {
  static constexpr bool kHasRoles = true;
  static constexpr int kQueries = 32, kRegisterDims = 64;
  static constexpr int kGroups = 2, kSplit = 2;
  static constexpr int kQStages = 1, kDoStages = 1, kDsStages = 2;
  static constexpr int kDqShares = 1;
};

template <int kHeadDim_, int kValueDim_, typename Element_, bool kHasSoftcap_, bool kHasMuchMemory_,
          typename Tile_ = BackwardTile<kHeadDim_, kValueDim_, kHasSoftcap_, kHasMuchMemory_>>
struct BackwardConfig : Tile_ {
  using Element = Element_;
  using Tile = Tile_;
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr bool kHasSoftcap = kHasSoftcap_;
  static constexpr bool kHasTerms = false;
  static constexpr int kRoles = Tile::kHasRoles ? 2 : 1;
  static constexpr int kWarps = Tile::kGroups * Tile::kSplit * kRoles, kThreads = 32 * kWarps;
  static constexpr int kKeys = 16 * Tile::kPieces * Tile::kGroups;
  // A warp computes the scores of this many queries at a time, kOwnChunks times.
  static constexpr int kChunk = Tile::kSplit == 1 ? 32 : Tile::kQueries / Tile::kSplit;
  static constexpr int kOwnChunks = Tile::kQueries / (kChunk * Tile::kSplit);
  static constexpr int kSharedValueDim = kValueDim - Tile::kRegisterDims;
  // The dims of a warp's dK and dV.
  static constexpr int kKDims = kHeadDim / Tile::kSplit, kVDims = kValueDim / Tile::kSplit;
  // dQ of a block is computed during the next block, so that one barrier a block is enough.
  static constexpr bool kDqIsLate = Tile::kDsStages == 2;
  // For dQ, each share of the warps has a share of the queries; a share of the dims is a warp's.
  static constexpr int kDqQueries = Tile::kQueries / Tile::kDqShares;
  static constexpr int kDqDims = kHeadDim / (kWarps / Tile::kDqShares);
  static constexpr int kDqPanelDims = DqPanelDims(kHeadDim);
  // Whether queries are the rows of dQ's product, as the layout of the sum asks for: see DqSum.
  static constexpr bool kDqByQuery = kHeadDim > 128;

  static_assert(kOwnChunks == 1 || Tile::kSplit == 1, "a warp has one chunk, or all of them");
  static_assert(kKDims % 16 == 0 && kVDims % 16 == 0, "whole pieces of dims");
  static_assert(kDqDims % 16 == 0, "whole pieces of keys");
  static_assert(kDqPanelDims % kDqDims == 0, "the dims of a warp are in one panel");
};

// One kernel covers all terms, with a cap and without, and all GPUs. Sums by key take up to 2 KB of
// shared memory, and queries and dO have one stage each.
template <int kHeadDim, int kValueDim>
struct BackwardTermsTile
    : BackwardTile<kHeadDim, kValueDim, /*kHasSoftcap=*/true, /*kHasMuchMemory=*/false> {
  static constexpr int kQStages = 1, kDoStages = 1;
};
// Terms know no roles. Half of the values are in registers, and a warp has half as many keys, which
// leaves registers for that: 89 KB.
template <>
struct BackwardTermsTile<256, 256> : UsualBackwardTile {
  static constexpr int kPieces = 1, kQueries = 32, kRegisterDims = 128;
  static constexpr int kGroups = 4, kSplit = 2;
  static constexpr int kQStages = 1, kDoStages = 1, kDsStages = 2;
};
template <int kHeadDim_, int kValueDim_, typename Element_>
struct BackwardTermsConfig
    : BackwardConfig<kHeadDim_, kValueDim_, Element_, /*kHasSoftcap=*/true,
                     /*kHasMuchMemory=*/false, BackwardTermsTile<kHeadDim_, kValueDim_>> {
  static constexpr bool kHasTerms = true;
  static_assert(BackwardTermsConfig::kSplit > 1, "sums by key are those of warps that share keys");
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_CONFIG_H_
