// Attention on a Hopper GPU.

#ifndef JAX_MAGI_CUDA_FORWARD_H_
#define JAX_MAGI_CUDA_FORWARD_H_

#include "cc/attention.h"
#include "cc/cuda/schedule.h"
#include "cc/cuda/status.h"

namespace jax_magi::cuda {

// The kernel's tiles for this call; all zero where no variant takes it.
Tiling ForwardTiling(const AttentionShape& shape, DType dtype, bool has_softcap);

// Enqueues the computation; allocates nothing and waits for nothing. Element types are bf16 and
// fp16; head_dim and value_dim are multiples of 8, up to 256. `plan` is on the device, as MakePlan
// made it for ForwardTiling's tiles, or null; the workspace has ScheduleBytes.
Status AttentionForward(const ForwardArgs& args, const int32_t* plan, void* workspace,
                        int sm_margin, cudaStream_t stream);

// One variant of the kernel, in a translation unit of its own.
template <int kHeadDim, int kValueDim, typename Element>
Status LaunchForward(const ForwardArgs& args, const int32_t* plan, void* workspace, int sm_margin,
                     cudaStream_t stream);
template <int kHeadDim, int kValueDim, typename Element>
Tiling ForwardTiling(const AttentionShape& shape, bool has_softcap);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_FORWARD_H_
