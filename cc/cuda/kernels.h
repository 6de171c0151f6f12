// Attention on a Hopper GPU.

#ifndef JAX_MAGI_CUDA_KERNELS_H_
#define JAX_MAGI_CUDA_KERNELS_H_

#include "cc/attention.h"
#include "cc/cuda/schedule.h"
#include "cc/cuda/status.h"

namespace jax_magi::cuda {

// How a call is launched, besides its operands.
struct LaunchOptions {
  const int32_t* plan;  // On the device, as MakePlan made it for the call's tiling; or null.
  void* workspace;      // As many bytes as the functions below say.
  int sm_margin;
  cudaStream_t stream;
};

// Each enqueues the computation; allocates nothing and waits for nothing. Element types are bf16
// and fp16; head_dim and value_dim are multiples of 8, up to 256.
Status AttentionForward(const ForwardArgs& args, const LaunchOptions& options);
// dk and dv have `num_splits` times the batch: each split has the sum over its part of a group.
Status AttentionBackward(const BackwardArgs& args, int num_splits, bool deterministic,
                         const LaunchOptions& options);

// The tiles of a call's plan; all zero where no variant of the kernel takes it. The backward kernel
// has a plan if it is not to be deterministic.
Tiling ForwardTiling(const AttentionShape& shape, DType dtype, bool has_softcap);
Tiling BackwardTiling(const AttentionShape& shape, DType dtype, bool has_softcap);

int64_t ForwardWorkspace(const AttentionShape& shape, DType dtype, bool has_softcap, bool has_plan);
int64_t BackwardWorkspace(const AttentionShape& shape, DType dtype, bool has_softcap, bool has_plan,
                          bool deterministic);

// Where there are few tiles of keys, the query heads of a group are split among blocks of threads.
int BackwardSplits(const AttentionShape& shape, DType dtype, bool has_softcap);

// One variant of a kernel, in a translation unit of its own.
template <int kHeadDim, int kValueDim, typename Element>
struct ForwardVariant {
  static Status Launch(const ForwardArgs& args, const LaunchOptions& options);
  static Tiling TilingOf(const AttentionShape& shape, bool has_softcap);
};
template <int kHeadDim, typename Element>
struct BackwardVariant {
  static Status Launch(const BackwardArgs& args, int num_splits, bool deterministic,
                       const LaunchOptions& options);
  static Tiling TilingOf(bool has_softcap, bool by_keys);
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_KERNELS_H_
