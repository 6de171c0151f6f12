// The kernels of a variant for Hopper.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_VARIANTS_H_
#define JAX_MAGI_CUDA_ATTENTION_SM90_VARIANTS_H_

#include "cc/cuda/attention/attention.h"

namespace jax_magi::cuda::sm90 {

// Each of these has a separate translation unit.
template <int kHeadDim, int kValueDim, typename Element>
struct ForwardVariant {
  static Status Launch(const ForwardArgs& args, const LaunchOptions& options);
  static Tiling TilingOf(const AttentionCall& call);
};
template <int kHeadDim, int kValueDim, typename Element>
struct ForwardTermsVariant {
  static Status Launch(const ForwardArgs& args, const LaunchOptions& options);
  static Tiling TilingOf(const AttentionCall& call);
};
template <int kHeadDim, int kValueDim, typename Element>
struct BackwardVariant {
  static Status Launch(const BackwardArgs& args, int num_parts, bool deterministic,
                       const LaunchOptions& options);
  static Tiling TilingOf(const AttentionCall& call);
  // That without clusters, if the variant never runs in clusters.
  static Tiling ClusterTilingOf(const AttentionCall& call);
};
template <int kHeadDim, int kValueDim, typename Element>
struct BackwardTermsVariant {
  static Status Launch(const BackwardArgs& args, int num_parts, bool deterministic,
                       const LaunchOptions& options);
  static Tiling TilingOf(const AttentionCall& call);
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_VARIANTS_H_
