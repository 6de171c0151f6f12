// Tile sizes of the Hopper kernels, one specialisation per pair of head dims. A number without a
// reason of its own is the largest for which registers or shared memory suffice.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_CONFIG_H_
#define JAX_MAGI_CUDA_ATTENTION_SM90_CONFIG_H_

namespace jax_magi::cuda {

// Threads of a warpgroup, the unit that issues wgmma.
constexpr int kWarpgroup = 128;

template <int kHeadDim, int kValueDim, bool kHasSoftcap, bool kIsSmall>
struct ForwardTile;

// Scores and output live in registers: kBlockN / 2 + kBlockN / 4 + kValueDim / 2 of them a thread,
// of 232 or more with two consumer warpgroups, 160 with three. Shared memory holds the stages of q,
// k and v.
template <bool kHasSoftcap, bool kIsSmall>
struct ForwardTile<64, 64, kHasSoftcap, kIsSmall> {
  // Softmax costs as many cycles as the matrix products here: three warpgroups hide more of it. But
  // small tiles may leave fewer rows empty, and share little work better.
  static constexpr int kNumConsumers = kIsSmall ? 2 : 3, kBlockN = 128;
  static constexpr int kQStages = 2, kKStages = 4, kVStages = 4;
  static constexpr bool kQInRegisters = kIsSmall;
};
template <bool kHasSoftcap>
struct ForwardTile<128, 128, kHasSoftcap, false> {
  static constexpr int kNumConsumers = 2, kBlockN = 128;
  // A third stage of k and v is worth 2% over a second one of q.
  static constexpr int kQStages = 1, kKStages = 3, kVStages = 3;
  // In registers, queries leave shared memory's bandwidth to keys, and their stage to the next
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

// A variant of its own stores a float32 output: with a branch for it in the epilogue, ptxas
// schedules the main loop of some others 2% slower.
template <int kHeadDim_, int kValueDim_, typename Element_, bool kHasSoftcap_,
          bool kIsSmall = false, bool kIsOutFloat_ = false, int kClusterSize_ = 1>
struct ForwardConfig : ForwardTile<kHeadDim_, kValueDim_, kHasSoftcap_, kIsSmall> {
  using Element = Element_;
  static constexpr bool kIsOutFloat = kIsOutFloat_;
  static constexpr bool kHasTerms = false;  // Of scores, besides the product: see terms_config.h.
  static constexpr bool kHasBiasBlocks = false, kIsBiasAlone = false, kAreSlopesAlone = false;
  static constexpr int kBiasStages = 1, kBiasAhead = 0;
  // On their way to registers, queries take a stage of the values' ring, and have none of their
  // own.
  static constexpr bool kQueriesByValues = false;
  static constexpr bool kCutsKeys = true;  // See key_parts.h.
  // Blocks of threads that work on the same rows of several query heads of a kv head, and load a
  // part of its keys and values each, for all of them: a panel.
  static constexpr int kClusterSize = kClusterSize_;
  using Tile = ForwardTile<kHeadDim_, kValueDim_, kHasSoftcap_, kIsSmall>;
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr bool kHasSoftcap = kHasSoftcap_;  // The code for it would cost all registers.
  static constexpr int kBlockM = 64 * Tile::kNumConsumers;  // wgmma has 64 rows.
  static constexpr int kNumThreads = kWarpgroup * (1 + Tile::kNumConsumers);
  // setmaxnreg: the producer needs few registers, and gives the rest to the consumers. The sum is
  // bounded by what the block starts with: 168 for 3 warpgroups, 128 for 4.
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

// Two consumer warpgroups, each with the gradients of 64 rows in registers: (kHeadDim + kValueDim)
// / 2 of them a thread; with 256 dims, one has dV of 64 rows and the other dK. A block's scores and
// their gradients take kBlockColumns / 2 registers each, dQ up to as many.
template <int kHeadDim, int kValueDim, bool kHasSoftcap>
struct BackwardTile;
template <bool kHasSoftcap>
struct BackwardTile<64, 64, kHasSoftcap> {
  static constexpr bool kHasRoles = false;
  static constexpr int kBlockColumns = kHasSoftcap ? 64 : 128;
  // Two of rows, for which queries give up their third: the next tile's are there when this one
  // ends. Under a window tiles are short, unless many heads share their keys.
  static constexpr int kRowStages = kHasSoftcap ? 1 : 2, kXStages = kHasSoftcap ? 3 : 2;
  static constexpr int kYStages = 2;
};
template <bool kHasSoftcap>
struct BackwardTile<128, 128, kHasSoftcap> {
  static constexpr bool kHasRoles = false;
  static constexpr int kBlockColumns = kHasSoftcap ? 48 : 80;
  static constexpr int kRowStages = 1, kXStages = kHasSoftcap ? 3 : 2, kYStages = 2;
};
// Gradients take 160 registers of 240, and one product at a time 48 more. Scores are packed before
// dP needs its own, and queries are the rows of dQ's product: there must be 64. Of 227 KB of shared
// memory, keys take 48, values 32, queries 48, dO 16, dS 32 and dQ 48: dO has one stage, so that
// all of a block's dQ has room at once and no warpgroup waits for the first half to be read.
template <bool kHasSoftcap>
struct BackwardTile<192, 128, kHasSoftcap> {
  static constexpr bool kHasRoles = false;
  static constexpr int kBlockColumns = 64;
  static constexpr int kRowStages = 1, kXStages = 2, kYStages = 1;
};
// Gradients take 128 registers, dQ 64, scores or dP 32 beside half of the dQ before. Of 227 KB of
// shared memory, keys and values take 32 each, queries 64, dO 32, probabilities and dS 16 each, and
// half of a block's dQ 32.
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
  // Stores float32 gradients of keys and values, and adds those of tiles whose heads are cut: see
  // head_cuts.h. Other calls have kernels that do not change by an instruction.
  static constexpr bool kCutsHeads = kCutsHeads_;
  // Blocks of threads that work on neighbouring rows, a tile together, and load a part of the
  // columns each, for all of them: a panel, or half of the only one.
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr bool kHasSoftcap = kHasSoftcap_;
  static constexpr bool kHasTerms = false;  // Of scores, besides the product: see terms_config.h.
  static constexpr bool kIsBiasAlone = false, kAreSlopesAlone = false, kHasAnyTerms = false;
  static constexpr int kZeroShare = 0;
  // Two bursts of products a block: scores and dP, then dV, dQ and dK. With a cap it was not tried,
  // and beyond 128 dims there are no registers for it.
  static constexpr bool kInTwoBursts = !kHasSoftcap && kHeadDim <= 128;
  // Products one after the other, as far as registers go: warpgroups are out of step, and one
  // multiplies while the other computes. Queries are the rows of dQ's product, which has half of
  // the dims for each warpgroup.
  static constexpr bool kTakesTurns = kHeadDim == 192 && !Tile::kHasRoles;
  // One warpgroup computes scores and dV, the other one dP, dS and dK: see backward_roles.cuh. Each
  // has half of the dims of dQ.
  static constexpr bool kHasRoles = Tile::kHasRoles;
  // dQ is that of the block before: warpgroups may be out of step.
  static constexpr bool kDqIsLate = kInTwoBursts || kTakesTurns || kHasRoles;
  // Statistics are read before the wait for scores, where there are registers for them.
  static constexpr bool kReadAhead = Tile::kBlockColumns <= 64 && !(kTakesTurns && kHasSoftcap);
  // Whether dK must be done before the next scores are issued: blocks of 80 queries fitted the
  // registers only so. Of the kernels with 128 dims, those with a cap still have this loop.
  static constexpr bool kWaitsForDx = kHeadDim == 128;
  static constexpr bool kKeepsProbabilities = kInTwoBursts;  // Unrounded.
  static constexpr int kNumConsumers = 2, kBlockRows = kHasRoles ? 64 : 64 * kNumConsumers;
  // The product for dQ: warpgroups share its panels of dims or, where there is but one, the
  // queries. Each adds a panel to memory in a step.
  static constexpr bool kSplitQueries = kHeadDim == 64;
  static constexpr int kDqPanelDims = kHeadDim == 192 ? 96 : 64;
  static constexpr int kDqSteps = kSplitQueries ? 1 : kHeadDim / (kDqPanelDims * kNumConsumers);
  static constexpr int kDqQueries = Tile::kBlockColumns / (kSplitQueries ? 2 : 1);
  static constexpr int kDqRegisters = kDqSteps * kDqPanelDims * kDqQueries / kWarpgroup;
  // Of keys in shared memory. Half of 192 dims is no multiple of 64.
  static constexpr int kRowPanelDims = kHeadDim == 192 ? 32 : 64;
  static constexpr int kNumThreads = kWarpgroup * (1 + kNumConsumers);
  static constexpr int kDsThreads = kWarpgroup * kNumConsumers;  // That wait for dS.
  static constexpr int kDsStages = 2;
  static constexpr bool kStoresDs = false;   // A warp of its own stores dS.
  static constexpr bool kBiasByTma = false;  // Blocks of a bias come to shared memory.
  // The product for dP takes values from registers, and leaves shared memory's bandwidth to others.
  static constexpr bool kRowYInRegisters = !kHasSoftcap && kHeadDim == 64;
  static constexpr bool kNeedsMost = kHeadDim >= 128 || kRowYInRegisters;
  // What setmaxnreg leaves and gives: three warpgroups begin with 168 each.
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

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_CONFIG_H_
