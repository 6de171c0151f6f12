#include "cc/cuda/forward.h"

#include "cutlass/numeric_types.h"

namespace jax_magi::cuda {
namespace {

template <typename Element>
constexpr DType kDTypeOf = DType::kF32;
template <>
constexpr DType kDTypeOf<cutlass::bfloat16_t> = DType::kBF16;
template <>
constexpr DType kDTypeOf<cutlass::half_t> = DType::kF16;

struct Variant {
  int64_t head_dim, value_dim;
  DType dtype;
  Status (*launch)(const ForwardArgs&, const int32_t*, void*, int, cudaStream_t);
  Tiling (*tiling)(const AttentionShape&, bool);
};

// Smaller head dims first: the first variant that holds the call's is taken.
#define JAX_MAGI_VARIANT(head_dim, value_dim, Element)                                         \
  Variant{head_dim, value_dim, kDTypeOf<Element>, LaunchForward<head_dim, value_dim, Element>, \
          ForwardTiling<head_dim, value_dim, Element>},
const Variant kVariants[] = {JAX_MAGI_FORWARD_VARIANTS};
#undef JAX_MAGI_VARIANT

const Variant* FindVariant(const AttentionShape& shape, DType dtype) {
  for (const Variant& variant : kVariants) {
    if (variant.dtype == dtype && shape.head_dim <= variant.head_dim &&
        shape.value_dim <= variant.value_dim) {
      return &variant;
    }
  }
  return nullptr;
}

}  // namespace

Tiling ForwardTiling(const AttentionShape& shape, DType dtype, bool has_softcap) {
  const Variant* variant = FindVariant(shape, dtype);
  return variant == nullptr ? Tiling{} : variant->tiling(shape, has_softcap);
}

Status AttentionForward(const ForwardArgs& args, const int32_t* plan, void* workspace,
                        int sm_margin, cudaStream_t stream) {
  const Variant* variant = FindVariant(args.shape, args.dtype);
  if (variant == nullptr) {
    return {"no variant of the kernel was built for this element type and head dim", __FILE__,
            __LINE__};
  }
  return variant->launch(args, plan, workspace, sm_margin, stream);
}

}  // namespace jax_magi::cuda
