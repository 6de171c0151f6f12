#include "cc/cuda/attention/sm80/variants.h"

#include "cc/cuda/attention/variant.h"

namespace jax_magi::cuda {
namespace sm80 {

template <int kHeadDim, int kValueDim, typename Element>
Variant VariantOf() {
  return MakeVariant<Element, ForwardVariant<kHeadDim, kValueDim, Element>,
                     ForwardTermsVariant<kHeadDim, kValueDim, Element>,
                     BackwardVariant<kHeadDim, kValueDim, Element>,
                     BackwardTermsVariant<kHeadDim, kValueDim, Element>>(Architecture::kSm80,
                                                                         kHeadDim, kValueDim);
}

}  // namespace sm80

const std::vector<Variant>& Sm80Variants() {
#define JAX_MAGI_VARIANT(head_dim, value_dim, Element) \
  sm80::VariantOf<head_dim, value_dim, Element>(),
  static const std::vector<Variant> variants = {JAX_MAGI_VARIANTS};
#undef JAX_MAGI_VARIANT
  return variants;
}

}  // namespace jax_magi::cuda
