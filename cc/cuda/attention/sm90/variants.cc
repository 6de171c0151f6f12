#include "cc/cuda/attention/sm90/variants.h"

#include "cc/cuda/attention/variant.h"

namespace jax_magi::cuda {
namespace {

template <int kHeadDim, int kValueDim, typename Element>
Variant VariantOf() {
  using Forward = ForwardVariant<kHeadDim, kValueDim, Element>;
  using ForwardTerms = ForwardTermsVariant<kHeadDim, kValueDim, Element>;
  using Backward = BackwardVariant<kHeadDim, kValueDim, Element>;
  using BackwardTerms = BackwardTermsVariant<kHeadDim, kValueDim, Element>;
  return {Architecture::kSm90,
          kHeadDim,
          kValueDim,
          kDTypeOf<Element>,
          {Forward::Launch, Forward::TilingOf},
          {ForwardTerms::Launch, ForwardTerms::TilingOf},
          {Backward::Launch, Backward::TilingOf, Backward::ClusterTilingOf, /*cuts_heads=*/true},
          {BackwardTerms::Launch, BackwardTerms::TilingOf}};
}

}  // namespace

const std::vector<Variant>& Sm90Variants() {
#define JAX_MAGI_VARIANT(head_dim, value_dim, Element) VariantOf<head_dim, value_dim, Element>(),
  static const std::vector<Variant> variants = {JAX_MAGI_VARIANTS};
#undef JAX_MAGI_VARIANT
  return variants;
}

}  // namespace jax_magi::cuda
