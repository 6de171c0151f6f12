// What a summed dQ goes through after the backward kernel: one kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_FINISH_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_FINISH_H_

#include <cuda_runtime.h>

#include "cc/attention.h"
#include "cc/cuda/attention/dq_sum.h"

namespace jax_magi::cuda {

// args.dq = softmax_scale * sum, in its own order and dtype. It may start before the kernel before
// it has ended, and waits for it.
cudaError_t FinishBackward(const BackwardArgs& args, const DqSum& sum, cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_FINISH_H_
