// One variant of the forward kernel; CMakeLists.txt names it.

#include "cc/cuda/attention/sm90/forward_launch.cuh"

template struct jax_magi::cuda::sm90::ForwardVariant<JAX_MAGI_VARIANT>;
