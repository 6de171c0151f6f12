// Kernel launches, and the device queries they need.

#ifndef JAX_MAGI_CUDA_LAUNCH_H_
#define JAX_MAGI_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

namespace jax_magi::cuda {

// Returns the error of this launch. After `<<<...>>>` there is only cudaGetLastError, which may
// return the error of an earlier call.
template <typename... Params, typename... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), unsigned num_blocks, unsigned num_threads,
                         cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_blocks);
  config.blockDim = dim3(num_threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Number of SMs of the current device.
inline cudaError_t GetNumSms(int* num_sms) {
  int device;
  const cudaError_t code = cudaGetDevice(&device);
  if (code != cudaSuccess) return code;
  return cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_LAUNCH_H_
