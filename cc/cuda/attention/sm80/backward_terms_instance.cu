// One variant of the backward kernel for scores with terms; CMakeLists.txt names it.

#include "cc/cuda/attention/sm80/variants.h"
#include "cutlass/numeric_types.h"

namespace jax_magi::cuda::sm80 {

// There is no kernel yet.
template <int kHeadDim, int kValueDim, typename Element>
Status BackwardTermsVariant<kHeadDim, kValueDim, Element>::Launch(const BackwardArgs&, int, bool,
                                                                  const LaunchOptions&) {
  return {"the backward pass with a bias or slopes is not written for sm_80", __FILE__, __LINE__};
}
template <int kHeadDim, int kValueDim, typename Element>
Tiling BackwardTermsVariant<kHeadDim, kValueDim, Element>::TilingOf(const AttentionCall&) {
  return {};
}

template struct BackwardTermsVariant<JAX_MAGI_VARIANT>;

}  // namespace jax_magi::cuda::sm80
