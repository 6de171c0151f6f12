// One variant of the forward kernel; CMakeLists.txt names it.

#include "cc/cuda/forward_launch.cuh"

namespace jax_magi::cuda {

template Status LaunchForward<JAX_MAGI_VARIANT>(const ForwardArgs& args, const int32_t* plan,
                                                void* workspace, int sm_margin,
                                                cudaStream_t stream);
template Tiling ForwardTiling<JAX_MAGI_VARIANT>(const AttentionShape& shape, bool has_softcap);

}  // namespace jax_magi::cuda
