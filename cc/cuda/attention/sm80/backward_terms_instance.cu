// One variant of the backward kernel for scores with terms; CMakeLists.txt names it.

#include "cc/cuda/attention/sm80/backward_launch.cuh"

template struct jax_magi::cuda::sm80::BackwardTermsVariant<JAX_MAGI_VARIANT>;
