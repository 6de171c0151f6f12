#include "cc/cuda/softmax/softmax.h"

namespace jax_magi::cuda {
namespace {

template <typename Call>
Status WithVariant(const SoftmaxShape& shape, const Call& call) {
  if (shape.num_rows() == 0) return {};
  switch (shape.dtype) {
    case DType::kF32:
      return call(SoftmaxVariant<DType::kF32>{});
    case DType::kBF16:
      return call(SoftmaxVariant<DType::kBF16>{});
    case DType::kF16:
      return call(SoftmaxVariant<DType::kF16>{});
  }
  return {"unknown element type", __FILE__, __LINE__};
}

}  // namespace

Status SoftmaxForward(const SoftmaxForwardArgs& args, cudaStream_t stream) {
  return WithVariant(args.shape, [&](auto variant) { return variant.Forward(args, stream); });
}

Status SoftmaxBackward(const SoftmaxBackwardArgs& args, cudaStream_t stream) {
  return WithVariant(args.shape, [&](auto variant) { return variant.Backward(args, stream); });
}

}  // namespace jax_magi::cuda
