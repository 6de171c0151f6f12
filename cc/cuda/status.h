// CUDA errors with the place they came from.

#ifndef JAX_MAGI_CUDA_STATUS_H_
#define JAX_MAGI_CUDA_STATUS_H_

#include <cuda_runtime.h>

#include <string>

namespace jax_magi::cuda {

struct Status {
  std::string message;  // Empty: all is well.
  const char* file = nullptr;
  int line = 0;

  bool ok() const { return message.empty(); }
};

// The runtime keeps the last error until somebody asks for it: the next call would find this one.
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
