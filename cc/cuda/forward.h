// Attention on a Hopper GPU.

#ifndef JAX_MAGI_CUDA_FORWARD_H_
#define JAX_MAGI_CUDA_FORWARD_H_

#include "cc/attention.h"
#include "cc/cuda/status.h"

namespace jax_magi::cuda {

// Bytes of workspace that AttentionForward needs.
int64_t ForwardWorkspace(const AttentionShape& shape);

// Enqueues the computation; allocates nothing and waits for nothing. Element types are bf16 and
// fp16; head_dim and value_dim are multiples of 8, up to 256.
Status AttentionForward(const ForwardArgs& args, void* workspace, int sm_margin,
                        cudaStream_t stream);

// One variant of the kernel, in a translation unit of its own.
template <int kHeadDim, int kValueDim, typename Element>
Status LaunchForward(const ForwardArgs& args, void* workspace, int sm_margin, cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_FORWARD_H_
