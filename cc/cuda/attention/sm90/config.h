// Tile sizes of the Hopper kernels, one specialisation per pair of head dims. A number without its
// own reason is the largest that registers or shared memory allow.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_CONFIG_H_
#define JAX_MAGI_CUDA_ATTENTION_SM90_CONFIG_H_

namespace jax_magi::cuda::sm90 {

// Threads of a warpgroup, the unit that issues wgmma.
constexpr int kWarpgroup = 128;

template <int kHeadDim, int kValueDim, bool kHasSoftcap, bool kIsSmall>
struct ForwardTile;

// Scores and output live in registers: a thread holds kBlockN / 2 + kBlockN / 4 + kValueDim / 2 of
// them, out of 232 or more with two consumer warpgroups, or 160 with three. Shared memory holds the
// stages of q, k and v.
template <bool kHasSoftcap, bool kIsSmall>
struct ForwardTile<64, 64, kHasSoftcap, kIsSmall> {
  // Softmax takes as many cycles as the matrix products here: three warpgroups hide more of it.
  // Small tiles, however, may leave fewer rows empty, and distribute a small amount of work better.
  static constexpr int kNumConsumers = kIsSmall ? 2 : 3, kBlockN = 128;
  static constexpr int kQStages = 2, kKStages = 4, kVStages = 4;
  static constexpr bool kQInRegisters = kIsSmall;
};
template <bool kHasSoftcap>
struct ForwardTile<128, 128, kHasSoftcap, false> {
  static constexpr int kNumConsumers = 2, kBlockN = 128;
  // A third stage of k and v gains 2% over a second stage of q.
  static constexpr int kQStages = 1, kKStages = 3, kVStages = 3;
  // Queries in registers leave the bandwidth of shared memory to keys, and their stage to the next
  // tile.
  static constexpr bool kQInRegisters = true;
};
template <bool kHasSoftcap>
struct ForwardTile<192, 128, kHasSoftcap, false> {
  static constexpr int kNumConsumers = 2, kBlockN = 112;
  static constexpr int kQStages = 1, kKStages = 2, kVStages = 2;
  static constexpr bool kQInRegisters = false;
};
template <bool kHasSoftcap>
struct ForwardTile<256, 256, kHasSoftcap, false> {
  static constexpr int kNumConsumers = 2, kBlockN = kHasSoftcap ? 48 : 64;
  static constexpr int kQStages = 1, kKStages = 2, kVStages = 2;
  static constexpr bool kQInRegisters = false;
};

// A separate variant stores a float32 output: with a branch for it in the epilogue, ptxas schedules
// the main loop of some other variants 2% slower.
template <int kHeadDim_, int kValueDim_, typename Element_, bool kHasSoftcap_,
          bool kIsSmall = false, bool kIsOutFloat_ = false, int kClusterSize_ = 1>
struct ForwardConfig : ForwardTile<kHeadDim_, kValueDim_, kHasSoftcap_, kIsSmall> {
  using Element = Element_;
  static constexpr bool kIsOutFloat = kIsOutFloat_;
  static constexpr bool kLoadsInChunks = false;  // See sm80/forward_config.h.
  static constexpr bool kHasTerms = false;       // Whether scores have terms: see terms_config.h.
  static constexpr bool kHasBiasBlocks = false, kIsBiasAlone = false, kAreSlopesAlone = false;
  static constexpr int kBiasStages = 1, kBiasAhead = 0;
  // Whether queries pass through a stage of the value ring on their way to registers, instead of
  // having a stage of their own.
  static constexpr bool kQueriesByValues = false;
  static constexpr bool kCutsKeys = true;  // See key_parts.h.
  // CTAs per cluster. They process the same rows of different query heads of a kv head, and each
  // loads a part of its keys and values, one panel, for all of them.
  static constexpr int kClusterSize = kClusterSize_;
  using Tile = ForwardTile<kHeadDim_, kValueDim_, kHasSoftcap_, kIsSmall>;
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  // A runtime branch would cost registers in every variant.
  static constexpr bool kHasSoftcap = kHasSoftcap_;
  static constexpr int kBlockM = 64 * Tile::kNumConsumers;  // wgmma has 64 rows.
  static constexpr int kNumThreads = kWarpgroup * (1 + Tile::kNumConsumers);
  // For setmaxnreg: the producer needs few registers, and gives the rest to the consumers. Their
  // sum is limited by what a CTA starts with: 168 per thread for 3 warpgroups, 128 for 4.
  static constexpr int kProducerRegisters = Tile::kNumConsumers == 3 ? 32
                                            : kHeadDim > 128         ? 24
                                                                     : 40;
  static constexpr int kConsumerRegisters = Tile::kNumConsumers == 3 ? 160
                                            : kHeadDim > 128         ? 240
                                                                     : 232;

  static_assert(kHeadDim % 64 == 0 && kValueDim % 64 == 0, "a swizzled panel is 64 wide");
  static_assert(kClusterSize == 1 || (kHeadDim == 64 * kClusterSize && kValueDim == kHeadDim),
                "each block of threads of a cluster loads a panel");
  static_assert(Tile::kBlockN % 16 == 0 && Tile::kBlockN <= 256, "wgmma's N, and TMA's box");
  static_assert(Tile::kNumConsumers == 2 || Tile::kNumConsumers == 3, "as setmaxnreg shares them");
};

// Two consumer warpgroups hold gradients in registers, each of 64 rows: (kHeadDim + kValueDim) / 2
// per thread. With 256 dims, one holds dV of 64 rows and the other dK. The scores of a block and
// their gradients take kBlockColumns / 2 registers each, and dQ up to as many.
template <int kHeadDim, int kValueDim, bool kHasSoftcap>
struct BackwardTile;
template <bool kHasSoftcap>
struct BackwardTile<64, 64, kHasSoftcap> {
  static constexpr bool kHasRoles = false;
  static constexpr int kBlockColumns = kHasSoftcap ? 64 : 128;
  // There are two row stages, in exchange for a third stage of queries: when a tile ends, the rows
  // of the next tile are already loaded. Under a window tiles are short, unless many heads share
  // their keys.
  static constexpr int kRowStages = kHasSoftcap ? 1 : 2, kXStages = kHasSoftcap ? 3 : 2;
  static constexpr int kYStages = 2;
};
template <bool kHasSoftcap>
struct BackwardTile<128, 128, kHasSoftcap> {
  static constexpr bool kHasRoles = false;
  static constexpr int kBlockColumns = kHasSoftcap ? 48 : 80;
  static constexpr int kRowStages = 1, kXStages = kHasSoftcap ? 3 : 2, kYStages = 2;
};
// Gradients take 160 of 240 registers, and one product at a time takes 48 more. Scores are packed
// before dP needs registers. Queries are the rows of dQ's product, so a block has 64 of them. Of
// 227 KB of shared memory, keys take 48, values 32, queries 48, dO 16, dS 32 and dQ 48: dO has one
// stage, so that all of a block's dQ fits at once and no warpgroup waits until the first half has
// been read.
template <bool kHasSoftcap>
struct BackwardTile<192, 128, kHasSoftcap> {
  static constexpr bool kHasRoles = false;
  static constexpr int kBlockColumns = 64;
  static constexpr int kRowStages = 1, kXStages = 2, kYStages = 1;
};
// Gradients take 128 registers, dQ takes 64, and scores or dP take 32 while half of the previous
// block's dQ is still in registers. Of 227 KB of shared memory, keys and values take 32 each,
// queries 64, dO 32, probabilities and dS 16 each, and half of a block's dQ 32.
template <bool kHasSoftcap>
struct BackwardTile<256, 256, kHasSoftcap> {
  static constexpr bool kHasRoles = true;
  static constexpr int kBlockColumns = 64;
  static constexpr int kRowStages = 1, kXStages = 2, kYStages = 1;
};

template <int kHeadDim_, int kValueDim_, typename Element_, bool kHasSoftcap_,
          typename Tile_ = BackwardTile<kHeadDim_, kValueDim_, kHasSoftcap_>, int kClusterSize_ = 1,
          bool kCutsHeads_ = false>
struct BackwardConfig : Tile_ {
  using Element = Element_;
  using Tile = Tile_;
  // Whether the kernel stores float32 gradients of keys and values, and adds those of tiles whose
  // heads are split: see head_cuts.h. This is a separate variant, so that the instructions of the
  // other kernels stay the same.
  static constexpr bool kCutsHeads = kCutsHeads_;
  // CTAs per cluster. They process neighbouring rows, which make up a tile together. Each loads a
  // part of the columns for all of them: a panel, or half of the only panel.
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr bool kHasSoftcap = kHasSoftcap_;
  static constexpr bool kHasTerms = false;  // Whether scores have terms: see terms_config.h.
  static constexpr bool kIsBiasAlone = false, kAreSlopesAlone = false, kHasAnyTerms = false;
  static constexpr int kZeroShare = 0;
  // Each block has two bursts of products: scores and dP, then dV, dQ and dK. With a cap this was
  // not tried, and beyond 128 dims there are not enough registers.
  static constexpr bool kInTwoBursts = !kHasSoftcap && kHeadDim <= 128;
  // Products are issued one after another, as far as registers allow. The warpgroups are out of
  // step: one multiplies while the other computes. Queries are the rows of dQ's product, and each
  // warpgroup computes half of its dims.
  static constexpr bool kTakesTurns = kHeadDim == 192 && !Tile::kHasRoles;
  // One warpgroup computes scores and dV, the other one dP, dS and dK: see backward_roles.cuh. Each
  // computes half of the dims of dQ.
  static constexpr bool kHasRoles = Tile::kHasRoles;
  // dQ is computed one block late, so that warpgroups may be out of step.
  static constexpr bool kDqIsLate = kInTwoBursts || kTakesTurns || kHasRoles;
  // Statistics are read before the wait for scores, if there are registers for them.
  static constexpr bool kReadAhead = Tile::kBlockColumns <= 64 && !(kTakesTurns && kHasSoftcap);
  // Whether dK must be complete before the next scores are issued: blocks of 80 queries fitted the
  // registers only this way. Of the kernels with 128 dims, those with a cap still use this loop.
  static constexpr bool kWaitsForDx = kHeadDim == 128;
  static constexpr bool kKeepsProbabilities = kInTwoBursts;  // Unrounded.
  static constexpr int kNumConsumers = 2, kBlockRows = kHasRoles ? 64 : 64 * kNumConsumers;
  // For dQ's product, the warpgroups split the panels of dims or, if there is only one panel, the
  // queries. Each warpgroup adds one panel to memory per step.
  static constexpr bool kSplitQueries = kHeadDim == 64;
  static constexpr int kDqPanelDims = kHeadDim == 192 ? 96 : 64;
  static constexpr int kDqSteps = kSplitQueries ? 1 : kHeadDim / (kDqPanelDims * kNumConsumers);
  static constexpr int kDqQueries = Tile::kBlockColumns / (kSplitQueries ? 2 : 1);
  static constexpr int kDqRegisters = kDqSteps * kDqPanelDims * kDqQueries / kWarpgroup;
  // The panel width of keys in shared memory. Half of 192 dims is not a multiple of 64.
  static constexpr int kRowPanelDims = kHeadDim == 192 ? 32 : 64;
  static constexpr int kNumThreads = kWarpgroup * (1 + kNumConsumers);
  static constexpr int kDsThreads = kWarpgroup * kNumConsumers;  // Threads that wait for dS.
  static constexpr int kDsStages = 2;
  static constexpr bool kStoresDs = false;   // A dedicated warp stores dS.
  static constexpr bool kBiasByTma = false;  // Blocks of a bias are loaded to shared memory.
  // dP's product takes values from registers, which leaves bandwidth of shared memory to others.
  static constexpr bool kRowYInRegisters = !kHasSoftcap && kHeadDim == 64;
  static constexpr bool kNeedsMost = kHeadDim >= 128 || kRowYInRegisters;
  // For setmaxnreg: three warpgroups start with 168 registers per thread.
  static constexpr int kProducerRegisters = kNeedsMost ? 24 : 40;
  static constexpr int kConsumerRegisters = kNeedsMost ? 240 : 232;

  static_assert(kHeadDim % 64 == 0, "a swizzled panel is 64 wide");
  static_assert(Tile::kRowStages == 1 || kRowYInRegisters, "values have one stage");
  static_assert(Tile::kBlockColumns % 16 == 0 && Tile::kBlockColumns <= 256,
                "wgmma's K and N, and TMA's box");
  static_assert(kSplitQueries || kDqSteps * kNumConsumers * kDqPanelDims == kHeadDim,
                "the steps of dQ's product cover all dims");
  static_assert(kHeadDim <= 128 || (Tile::kBlockColumns == 64 && kDqPanelDims % kRowPanelDims == 0),
                "dQ's product has 64 queries, and whole panels of keys");
  static_assert(!kSplitQueries || kDqQueries % 8 == 0, "half a block of queries is wgmma's N");
  static_assert(kClusterSize == 1 || !kCutsHeads, "clusters are for masks that are known");
  static_assert(kClusterSize == 1 || (kInTwoBursts && kClusterSize == 2),
                "each block of threads of a cluster loads a part");
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_CONFIG_H_
