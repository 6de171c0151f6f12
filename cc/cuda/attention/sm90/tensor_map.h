// Descriptors of a tensor's memory layout for the TMA unit.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_TENSOR_MAP_H_
#define JAX_MAGI_CUDA_ATTENTION_SM90_TENSOR_MAP_H_

#include <cuda.h>

#include "cc/attention.h"
#include "cc/cuda/status.h"

namespace jax_magi::cuda::sm90 {

// Describes boxes of `box_rows` rows x `box_heads` heads x `box_bytes`, 128 or 64, of a [batch,
// length, heads, dim] tensor. The swizzle is as wide as `box_bytes`. Everything outside the tensor
// is read as zero: rows before and after, and columns past `dim`, which must be a multiple of 16
// bytes. `name` is the name of the operand, for errors.
Status MakeTensorMap(const char* name, DType dtype, const void* data, int64_t batch, int64_t length,
                     int64_t heads, int64_t dim, int box_rows, int box_heads, int box_bytes,
                     CUtensorMap* map);

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_TENSOR_MAP_H_
