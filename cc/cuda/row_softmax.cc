#include "cc/cuda/row_softmax.h"

namespace jax_magi::cuda {

Status SoftmaxForward(const SoftmaxForwardArgs& args, cudaStream_t stream) {
  if (args.shape.num_rows() == 0) return {};
  switch (args.shape.dtype) {
    case DType::kF32:
      return SoftmaxVariant<DType::kF32>::Forward(args, stream);
    case DType::kBF16:
      return SoftmaxVariant<DType::kBF16>::Forward(args, stream);
    case DType::kF16:
      return SoftmaxVariant<DType::kF16>::Forward(args, stream);
  }
  return {"unknown element type", __FILE__, __LINE__};
}

Status SoftmaxBackward(const SoftmaxBackwardArgs& args, cudaStream_t stream) {
  if (args.shape.num_rows() == 0) return {};
  switch (args.shape.dtype) {
    case DType::kF32:
      return SoftmaxVariant<DType::kF32>::Backward(args, stream);
    case DType::kBF16:
      return SoftmaxVariant<DType::kBF16>::Backward(args, stream);
    case DType::kF16:
      return SoftmaxVariant<DType::kF16>::Backward(args, stream);
  }
  return {"unknown element type", __FILE__, __LINE__};
}

}  // namespace jax_magi::cuda
