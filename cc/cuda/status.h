// CUDA errors with the source location where they occurred.

#ifndef JAX_MAGI_CUDA_STATUS_H_
#define JAX_MAGI_CUDA_STATUS_H_

#include <cuda_runtime.h>

#include <string>

namespace jax_magi::cuda {

struct Status {
  std::string message;  // Empty: no error.
  const char* file = nullptr;
  int line = 0;

  bool ok() const { return message.empty(); }
};

// Clears the last error, which the runtime keeps until it is read: the next call would return it.
inline Status FailureOf(cudaError_t code, const char* file, int line) {
  cudaGetLastError();
  return {cudaGetErrorString(code), file, line};
}

}  // namespace jax_magi::cuda

#define JAX_MAGI_RETURN_IF_BAD(expression) \
  if (::jax_magi::cuda::Status status = (expression); !status.ok()) return status

#define JAX_MAGI_CUDA_RETURN_IF_ERROR(expression)                   \
  if (const cudaError_t code = (expression); code != cudaSuccess) { \
    return ::jax_magi::cuda::FailureOf(code, __FILE__, __LINE__);   \
  }

#endif  // JAX_MAGI_CUDA_STATUS_H_
