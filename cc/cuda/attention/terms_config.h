// Configurations of the kernels for calls whose scores have terms besides the product of queries
// and keys: a bias, or ALiBi's slopes. They serve most kinds of them, with a cap and without, as
// calls without terms shall pay nothing for it, and a build not much.

#ifndef JAX_MAGI_CUDA_ATTENTION_TERMS_CONFIG_H_
#define JAX_MAGI_CUDA_ATTENTION_TERMS_CONFIG_H_

#include "cc/cuda/attention/config.h"

namespace jax_magi::cuda {

// Tiles of 128 rows. Where the bias differs from query to query, shared memory holds a block of it
// for each stage of keys: with 128 dims there is room for two.
template <int kHeadDim_, typename Element_, bool kHasBiasBlocks_, int kClusterSize_ = 1>
struct ForwardTermsConfig
    : ForwardConfig<kHeadDim_, kHeadDim_, Element_, /*kHasSoftcap=*/true,
                    /*kIsSmall=*/kHeadDim_ == 64, /*kIsOutFloat=*/false, kClusterSize_> {
  static constexpr bool kHasTerms = true, kHasBiasBlocks = kHasBiasBlocks_;
  static constexpr int kQStages = 1;
  static constexpr int kKStages = (kHeadDim_ == 64 ? 3 : 2) + !kHasBiasBlocks, kVStages = kKStages;
};

// The bias takes no shared memory of its own where dS has some.
template <int kHeadDim>
struct BackwardTermsTile {
  static constexpr int kDimParts = 1;
  static constexpr int kBlockColumns = 64;
  static constexpr int kXStages = 3, kYStages = 2;
};
template <int kHeadDim_, typename Element_, BackwardPart kPart>
struct BackwardTermsConfig : BackwardConfig<kHeadDim_, Element_, /*kHasSoftcap=*/false, kPart,
                                            BackwardTermsTile<kHeadDim_>> {
  static constexpr bool kHasTerms = true;
  static constexpr bool kStartIsScore = false, kStartsScores = false, kTakesTurns = false;
  // The warp that stores dS takes part in the consumers' barrier.
  static constexpr bool kDqIsLate = false;
  static constexpr bool kReadAhead = false;  // There are no registers for it.
  // With 64 dims, consumers can spare what the producer needs for the bias.
  static constexpr bool kNeedsMost = kHeadDim_ == 128 && kPart != BackwardPart::kQueries;
  static constexpr int kProducerRegisters = kNeedsMost ? 24 : 40;
  static constexpr int kConsumerRegisters = kNeedsMost ? 240 : 232;
  // Threads that wait for dS: all consumers, and the warp that stores it.
  static constexpr int kDsThreads = 2 * kWarpgroup + 32;
  // Where rows are queries there is no dS in shared memory, and the bias comes with the values.
  static constexpr bool kHasBiasStages = kPart == BackwardPart::kQueries;
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TERMS_CONFIG_H_
