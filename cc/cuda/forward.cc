#include "cc/cuda/forward.h"

#include "cc/cuda/schedule.h"
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
  Status (*launch)(const ForwardArgs&, void*, int, cudaStream_t);
};

// Smaller head dims first: the first variant that holds the call's is taken.
#define JAX_MAGI_VARIANT(head_dim, value_dim, Element) \
  Variant{head_dim, value_dim, kDTypeOf<Element>, LaunchForward<head_dim, value_dim, Element>},
const Variant kVariants[] = {JAX_MAGI_FORWARD_VARIANTS};
#undef JAX_MAGI_VARIANT

}  // namespace

int64_t ForwardWorkspace(const AttentionShape& shape) {
  constexpr int64_t kSmallestBlockM = 128;
  return ScheduleBytes(MaxTiles(shape, kSmallestBlockM));
}

Status AttentionForward(const ForwardArgs& args, void* workspace, int sm_margin,
                        cudaStream_t stream) {
  for (const Variant& variant : kVariants) {
    if (variant.dtype == args.dtype && args.shape.head_dim <= variant.head_dim &&
        args.shape.value_dim <= variant.value_dim) {
      return variant.launch(args, workspace, sm_margin, stream);
    }
  }
  return {"no variant of the kernel was built for this element type and head dim", __FILE__,
          __LINE__};
}

}  // namespace jax_magi::cuda
