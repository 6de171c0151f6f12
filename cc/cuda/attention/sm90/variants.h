// The variants of the kernels that are built, one for each pair of head dims and element type.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_VARIANTS_H_
#define JAX_MAGI_CUDA_ATTENTION_SM90_VARIANTS_H_

#include "cc/cuda/attention/attention.h"

namespace jax_magi::cuda {

// Each variant of a kernel has a separate translation unit. The variants with terms support any of
// the terms, with a cap and without.
template <int kHeadDim, int kValueDim, typename Element>
struct ForwardVariant {
  static Status Launch(const ForwardArgs& args, const LaunchOptions& options);
  static Tiling TilingOf(const AttentionShape& shape, bool has_softcap);
};
template <int kHeadDim, int kValueDim, typename Element>
struct ForwardTermsVariant {
  static Status Launch(const ForwardArgs& args, const LaunchOptions& options);
  static Tiling TilingOf(const AttentionShape& shape);
};
template <int kHeadDim, int kValueDim, typename Element>
struct BackwardVariant {
  static Status Launch(const BackwardArgs& args, int num_parts, bool deterministic,
                       const LaunchOptions& options);
  // The tiling in clusters equals that without if the variant never runs in clusters.
  static Tiling TilingOf(bool has_softcap, bool in_clusters);
};
template <int kHeadDim, int kValueDim, typename Element>
struct BackwardTermsVariant {
  static Status Launch(const BackwardArgs& args, int num_parts, bool deterministic,
                       const LaunchOptions& options);
  // Slopes are alone if their gradient is not requested, and there is neither a bias nor a cap.
  static Tiling TilingOf(bool are_slopes_alone);
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_VARIANTS_H_
