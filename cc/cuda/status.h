// CUDA errors with the place they came from.

#ifndef JAX_MAGI_CUDA_STATUS_H_
#define JAX_MAGI_CUDA_STATUS_H_

#include <cuda_runtime.h>

namespace jax_magi::cuda {

struct Status {
  const char* message = nullptr;  // Null: all is well.
  const char* file = nullptr;
  int line = 0;
};

}  // namespace jax_magi::cuda

#define JAX_MAGI_CUDA_RETURN_IF_ERROR(expression)                                  \
  if (const cudaError_t code = (expression); code != cudaSuccess) {                \
    return ::jax_magi::cuda::Status{cudaGetErrorString(code), __FILE__, __LINE__}; \
  }

#endif  // JAX_MAGI_CUDA_STATUS_H_
