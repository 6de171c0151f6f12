#include "cc/cuda/attention/sm90/variants.h"

#include "cc/cuda/attention/variant.h"

namespace jax_magi::cuda {
namespace sm90 {

template <int kHeadDim, int kValueDim, typename Element>
Variant VariantOf() {
  using Backward = BackwardVariant<kHeadDim, kValueDim, Element>;
  Variant variant = MakeVariant<Element, ForwardVariant<kHeadDim, kValueDim, Element>,
                                ForwardTermsVariant<kHeadDim, kValueDim, Element>, Backward,
                                BackwardTermsVariant<kHeadDim, kValueDim, Element>>(
      Architecture::kSm90, kHeadDim, kValueDim);
  variant.backward.cluster_tiling = Backward::ClusterTilingOf;
  variant.backward.cuts_heads = true;
  return variant;
}

}  // namespace sm90

const std::vector<Variant>& Sm90Variants() {
#define JAX_MAGI_VARIANT(head_dim, value_dim, Element) \
  sm90::VariantOf<head_dim, value_dim, Element>(),
  static const std::vector<Variant> variants = {JAX_MAGI_VARIANTS};
#undef JAX_MAGI_VARIANT
  return variants;
}

}  // namespace jax_magi::cuda
