// One variant of the forward kernel for scores with terms; CMakeLists.txt names it.

#include "cc/cuda/attention/forward_launch.cuh"
#include "cc/cuda/attention/terms_config.h"

namespace jax_magi::cuda {

template <int kHeadDim, typename Element>
Status ForwardTermsVariant<kHeadDim, Element>::Launch(const ForwardArgs& args,
                                                      const LaunchOptions& options) {
  return LaunchForward<ForwardTermsConfig<kHeadDim, Element>>(args, options);
}

template <int kHeadDim, typename Element>
Tiling ForwardTermsVariant<kHeadDim, Element>::TilingOf(const AttentionShape& shape) {
  return ConfigTiling<ForwardTermsConfig<kHeadDim, Element>>(shape);
}

template struct ForwardTermsVariant<JAX_MAGI_VARIANT>;

}  // namespace jax_magi::cuda
