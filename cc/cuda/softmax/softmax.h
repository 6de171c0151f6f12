// The launchers of the fused scale + mask + softmax on a GPU.

#ifndef JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_H_
#define JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_H_

#include "cc/cuda/status.h"
#include "cc/softmax.h"

namespace jax_magi::cuda {

// Each launcher enqueues the computation, allocates nothing and waits for nothing. Arrays begin at
// multiples of 16 bytes, and have fewer than 2^31 rows.
Status SoftmaxForward(const SoftmaxForwardArgs& args, cudaStream_t stream);
Status SoftmaxBackward(const SoftmaxBackwardArgs& args, cudaStream_t stream);

// The launchers of one element type, in a separate translation unit.
template <DType kDType>
struct SoftmaxVariant {
  static Status Forward(const SoftmaxForwardArgs& args, cudaStream_t stream);
  static Status Backward(const SoftmaxBackwardArgs& args, cudaStream_t stream);
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_H_
