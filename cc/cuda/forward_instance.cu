// One variant of the forward kernel; CMakeLists.txt names it.

#include "cc/cuda/forward_launch.cuh"

namespace jax_magi::cuda {

template Status LaunchForward<JAX_MAGI_VARIANT>(const ForwardArgs& args, void* workspace,
                                                int sm_margin, cudaStream_t stream);

}  // namespace jax_magi::cuda
