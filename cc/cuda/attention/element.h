// The element types of the kernels.

#ifndef JAX_MAGI_CUDA_ATTENTION_ELEMENT_H_
#define JAX_MAGI_CUDA_ATTENTION_ELEMENT_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace jax_magi::cuda {

using bfloat16_t = __nv_bfloat16;
using half_t = __half;

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_ELEMENT_H_
