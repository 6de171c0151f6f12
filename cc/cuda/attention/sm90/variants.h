// The kernels that are built: one variant for each pair of head dims and element type.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_VARIANTS_H_
#define JAX_MAGI_CUDA_ATTENTION_SM90_VARIANTS_H_

#include "cc/cuda/attention/attention.h"

namespace jax_magi::cuda {

// One variant of a kernel, in a translation unit of its own. Those for scores with terms take any
// of them, with a cap and without.
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
  // The same in clusters as without, where it never runs in any.
  static Tiling TilingOf(bool has_softcap, bool in_clusters);
};
template <int kHeadDim, int kValueDim, typename Element>
struct BackwardTermsVariant {
  static Status Launch(const BackwardArgs& args, int num_parts, bool deterministic,
                       const LaunchOptions& options);
  // Slopes are alone if they have no gradient, and there is neither a bias nor a cap.
  static Tiling TilingOf(bool are_slopes_alone);
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_VARIANTS_H_
