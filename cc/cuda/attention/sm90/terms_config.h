// Configurations of the kernels for calls whose scores have terms besides the product of queries
// and keys: a bias, or ALiBi's slopes. They serve most kinds of them, with a cap and without, as
// calls without terms shall pay nothing for it, and a build not much.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_TERMS_CONFIG_H_
#define JAX_MAGI_CUDA_ATTENTION_SM90_TERMS_CONFIG_H_

#include "cc/cuda/attention/sm90/config.h"

namespace jax_magi::cuda {

// Which terms there are: any, and a cap perhaps; a bias in tiles and nothing else; slopes and
// nothing else, in the backward pass without a gradient of them.
enum class Terms { kAny, kBias, kSlopes };

// Tiles of 128 rows. Where the bias differs from query to query, shared memory holds blocks of it,
// in a ring of its own: with 128 dims there is room for two, and queries come through the ring of
// values.
template <int kHeadDim_, typename Element_, bool kHasBiasBlocks_, int kClusterSize_ = 1,
          Terms kTerms = Terms::kAny>
struct ForwardTermsConfig
    : ForwardConfig<kHeadDim_, kHeadDim_, Element_, /*kHasSoftcap=*/true,
                    /*kIsSmall=*/kHeadDim_ == 64, /*kIsOutFloat=*/false, kClusterSize_> {
  static constexpr bool kHasTerms = true, kHasBiasBlocks = kHasBiasBlocks_;
  static constexpr bool kIsBiasAlone = kTerms == Terms::kBias;
  static constexpr bool kAreSlopesAlone = kTerms == Terms::kSlopes;
  static_assert(kTerms == Terms::kAny || kHasBiasBlocks == kIsBiasAlone, "a bias alone has blocks");
  static constexpr bool kQueriesByValues = kHasBiasBlocks && kHeadDim_ == 128;
  // So many of a block's eight reads of it come before the wait for scores; more would cost
  // registers that the loop needs.
  static constexpr int kBiasAhead = kIsBiasAlone ? 4 : 0;
  static constexpr bool kCutsKeys = kTerms != Terms::kAny;  // There are no registers for it.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kQStages = 1;
  static constexpr int kKStages = (kHeadDim_ == 64 ? 3 : 2) + !kHasBiasBlocks;
  static constexpr int kVStages = kKStages + kQueriesByValues;
  static constexpr int kBiasStages = kKStages;
};

// Beyond 128 dims: any terms, and blocks of 64 keys. Of 227 KB of shared memory, 192 and 128 dims
// take 48 for queries and 56 a stage with a bias in it; 256 dims take 64, and 80 a stage. So there
// are as many stages as without a bias. Scores and output take 112 and 176 registers of 240.
template <int kHeadDim_, int kValueDim_, typename Element_, bool kHasBiasBlocks_>
struct WideForwardTermsConfig
    : ForwardConfig<kHeadDim_, kValueDim_, Element_, /*kHasSoftcap=*/true> {
  static constexpr bool kHasTerms = true, kHasBiasBlocks = kHasBiasBlocks_;
  static constexpr bool kCutsKeys = false;
  static constexpr int kBlockN = 64;
  static constexpr int kKStages = kHeadDim_ == 192 ? 3 : 2;
  static constexpr int kVStages = kKStages, kBiasStages = kKStages;
};

// The bias takes no shared memory of its own: it lies where dS will be.
template <int kHeadDim, Terms kTerms>
struct BackwardTermsTile {
  static constexpr bool kHasRoles = false;
  static constexpr int kBlockColumns = 64;
  static constexpr int kRowStages = 1, kXStages = 3, kYStages = 2;
};
// Blocks of slopes alone are as wide as without terms.
template <int kHeadDim>
struct BackwardTermsTile<kHeadDim, Terms::kSlopes>
    : BackwardTile<kHeadDim, kHeadDim, /*kHasSoftcap=*/false> {};

template <int kHeadDim_, typename Element_, Terms kTerms = Terms::kAny>
struct BackwardTermsConfig : BackwardConfig<kHeadDim_, kHeadDim_, Element_, /*kHasSoftcap=*/false,
                                            BackwardTermsTile<kHeadDim_, kTerms>> {
  static constexpr bool kHasTerms = true;
  static constexpr bool kIsBiasAlone = kTerms == Terms::kBias;
  static constexpr bool kAreSlopesAlone = kTerms == Terms::kSlopes;
  static constexpr bool kHasAnyTerms = kTerms == Terms::kAny;
  // The warp that stores dS takes part in the consumers' barrier where dQ is not late.
  static constexpr bool kDqIsLate = !kHasAnyTerms;
  // A late dQ keeps dS one block longer: the bias needs another place. They are those of queries.
  static constexpr int kDsStages = kIsBiasAlone ? 3 : 2;
  static_assert(kDsStages == 2 || kDsStages == BackwardTermsTile<kHeadDim_, kTerms>::kXStages,
                "dS is where queries are");
  // One of so many blocks of threads writes zeros for hidden pairs before it works on others. When
  // there is no work left, all write what is left of them.
  static constexpr int kZeroShare = kIsBiasAlone ? 20 : 0;
  static constexpr bool kStoresDs = !kAreSlopesAlone, kBiasByTma = true;
  static constexpr bool kReadAhead = false;  // There are no registers for it.
  // With 64 dims, consumers can spare what the producer needs for the bias.
  static constexpr bool kNeedsMost = kHeadDim_ == 128 || kAreSlopesAlone;
  static constexpr int kProducerRegisters = kNeedsMost ? 24 : 40;
  static constexpr int kConsumerRegisters = kNeedsMost ? 240 : 232;
  // Threads that wait for dS: all consumers, and the warp that stores it.
  static constexpr int kDsThreads = 2 * kWarpgroup + 32 * kStoresDs;
};

// Beyond 128 dims: any terms, and warpgroups with roles, as for 256 dims without terms. The one
// that computes scores has registers for a block of the bias, which it reads from memory itself.
// With 192 and 128 dims, gradients take 96 registers or 64 of a thread and dQ 48; of shared memory,
// keys take 24 KB, values 16, queries 48, dO 32, probabilities and dS 16 each, and dQ 48.
template <int kHeadDim>
struct WideBackwardTermsTile {
  static constexpr bool kHasRoles = true;
  static constexpr int kBlockColumns = 64;
  static constexpr int kRowStages = 1, kXStages = 2, kYStages = kHeadDim == 192 ? 2 : 1;
};
template <int kHeadDim_, int kValueDim_, typename Element_>
struct WideBackwardTermsConfig
    : BackwardConfig<kHeadDim_, kValueDim_, Element_, /*kHasSoftcap=*/false,
                     WideBackwardTermsTile<kHeadDim_>> {
  static constexpr bool kHasTerms = true, kHasAnyTerms = true;
  static constexpr bool kReadAhead = false;  // The bias takes these registers.
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_TERMS_CONFIG_H_
