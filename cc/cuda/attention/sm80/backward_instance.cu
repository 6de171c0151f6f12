// One variant of the backward kernel; CMakeLists.txt names it.

#include "cc/cuda/attention/sm80/backward_launch.cuh"

template struct jax_magi::cuda::sm80::BackwardVariant<JAX_MAGI_VARIANT>;
