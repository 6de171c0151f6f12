// One variant of the forward kernel; CMakeLists.txt names it.

#include "cc/cuda/attention/sm80/forward_launch.cuh"

template struct jax_magi::cuda::sm80::ForwardVariant<JAX_MAGI_VARIANT>;
