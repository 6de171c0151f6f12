// Configurations of the kernels for calls whose scores have terms besides the product of queries
// and keys: a bias, or ALiBi slopes. One kernel covers most kinds of terms, with a cap and without:
// terms must cost calls without terms nothing, and a build little.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_TERMS_CONFIG_H_
#define JAX_MAGI_CUDA_ATTENTION_SM90_TERMS_CONFIG_H_

#include "cc/cuda/attention/sm90/config.h"

namespace jax_magi::cuda::sm90 {

// The terms that a kernel supports: any terms, with or without a cap; only a bias in tiles; or only
// slopes, in the backward pass without their gradient.
enum class Terms { kAny, kBias, kSlopes };

// Tiles have 128 rows. If the bias differs from query to query, shared memory holds blocks of it in
// a separate ring. With 128 dims there is room for two blocks, and queries come through the ring of
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
  // This many of the eight reads of a block's bias are issued before the wait for scores; more
  // would cost registers that the loop needs.
  static constexpr int kBiasAhead = kIsBiasAlone ? 4 : 0;
  static constexpr bool kCutsKeys = kTerms != Terms::kAny;  // There are no registers for it.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kQStages = 1;
  static constexpr int kKStages = (kHeadDim_ == 64 ? 3 : 2) + !kHasBiasBlocks;
  static constexpr int kVStages = kKStages + kQueriesByValues;
  static constexpr int kBiasStages = kKStages;
};

// Beyond 128 dims, kernels support any terms, with blocks of 64 keys. Of 227 KB of shared memory,
// 192 and 128 dims take 48 KB for queries and 56 KB per stage with a bias; 256 dims take 64 KB, and
// 80 KB per stage. There are therefore as many stages as without a bias. Scores and output take 112
// and 176 registers of 240, respectively.
template <int kHeadDim_, int kValueDim_, typename Element_, bool kHasBiasBlocks_>
struct WideForwardTermsConfig
    : ForwardConfig<kHeadDim_, kValueDim_, Element_, /*kHasSoftcap=*/true> {
  static constexpr bool kHasTerms = true, kHasBiasBlocks = kHasBiasBlocks_;
  static constexpr bool kCutsKeys = false;
  static constexpr int kBlockN = 64;
  static constexpr int kKStages = kHeadDim_ + kValueDim_ <= 320 ? 3 : 2;
  static constexpr int kVStages = kKStages, kBiasStages = kKStages;
};

// The bias takes no extra shared memory: it is loaded to where dS will be written.
template <int kHeadDim, Terms kTerms>
struct BackwardTermsTile {
  static constexpr bool kHasRoles = false;
  static constexpr int kBlockColumns = 64;
  static constexpr int kRowStages = 1, kXStages = 3, kYStages = 2;
};
// Blocks of the kernel for slopes alone are as wide as without terms.
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
  // If dQ is not late, the warp that stores dS takes part in the consumers' barrier.
  static constexpr bool kDqIsLate = !kHasAnyTerms;
  // A late dQ keeps dS one block longer, so the bias needs a third stage. dS then has as many
  // stages as queries.
  static constexpr int kDsStages = kIsBiasAlone ? 3 : 2;
  static_assert(kDsStages == 2 || kDsStages == BackwardTermsTile<kHeadDim_, kTerms>::kXStages,
                "dS is where queries are");
  // One in this many CTAs writes zeros for hidden pairs before it starts with other work. When no
  // other work is left, all CTAs write the remaining zeros.
  static constexpr int kZeroShare = kIsBiasAlone ? 20 : 0;
  static constexpr bool kStoresDs = !kAreSlopesAlone, kBiasByTma = true;
  static constexpr bool kReadAhead = false;  // There are no registers for it.
  // With 64 dims, consumers can spare the registers that the producer needs for the bias.
  static constexpr bool kNeedsMost = kHeadDim_ == 128 || kAreSlopesAlone;
  static constexpr int kProducerRegisters = kNeedsMost ? 24 : 40;
  static constexpr int kConsumerRegisters = kNeedsMost ? 240 : 232;
  // Threads that wait for dS: all consumers, and the warp that stores it.
  static constexpr int kDsThreads = 2 * kWarpgroup + 32 * kStoresDs;
};

// Beyond 128 dims, kernels support any terms, and warpgroups have roles, as for 256 dims without
// terms. The warpgroup that computes scores has registers for a block of the bias, which it reads
// from memory itself. With 192 and 128 dims, gradients take 96 or 64 registers of a thread and dQ
// 48. Of shared memory, keys take 24 KB, values 16, queries 48, dO 32, probabilities and dS 16
// each, and dQ 48.
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

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_TERMS_CONFIG_H_
