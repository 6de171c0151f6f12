// One variant of the forward kernel for scores with terms; CMakeLists.txt names it.

#include "cc/cuda/attention/sm80/forward_launch.cuh"

namespace jax_magi::cuda::sm80 {

template <int kHeadDim, int kValueDim, typename Element>
Status ForwardTermsVariant<kHeadDim, kValueDim, Element>::Launch(const ForwardArgs& args,
                                                                 const LaunchOptions& options) {
  return LaunchForward<ForwardTermsConfig<kHeadDim, kValueDim, Element>>(args, options);
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling ForwardTermsVariant<kHeadDim, kValueDim, Element>::TilingOf(const AttentionCall&) {
  return ForwardTiling<ForwardTermsConfig<kHeadDim, kValueDim, Element>>();
}

template struct ForwardTermsVariant<JAX_MAGI_VARIANT>;

}  // namespace jax_magi::cuda::sm80
