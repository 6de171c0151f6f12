// The element types of the kernels, which only name a format: kernels read and write elements in
// pairs, vectors and copies of whole rows.

#ifndef JAX_MAGI_CUDA_ATTENTION_ELEMENT_H_
#define JAX_MAGI_CUDA_ATTENTION_ELEMENT_H_

#include <cstdint>

namespace jax_magi::cuda {

// nvcc compiles a kernel by other rules if "cutlass" occurs in its name
// (github.com/NVIDIA/cutlass/issues/3389), and an element type is part of a kernel's name. All
// kernels were tuned and timed under these rules.
namespace as_cutlass {

struct bfloat16_t {
  uint16_t bits;
};

struct half_t {
  uint16_t bits;
};

}  // namespace as_cutlass

using as_cutlass::bfloat16_t;
using as_cutlass::half_t;

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_ELEMENT_H_
