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

// An attribute of the current device.
inline cudaError_t GetAttribute(cudaDeviceAttr attribute, int* value) {
  int device;
  const cudaError_t code = cudaGetDevice(&device);
  if (code != cudaSuccess) return code;
  return cudaDeviceGetAttribute(value, attribute, device);
}
inline cudaError_t GetNumSms(int* num_sms) {
  return GetAttribute(cudaDevAttrMultiProcessorCount, num_sms);
}
// 10 * major + minor.
inline cudaError_t GetComputeCapability(int* compute_capability) {
  int major, minor;
  cudaError_t code = GetAttribute(cudaDevAttrComputeCapabilityMajor, &major);
  if (code == cudaSuccess) code = GetAttribute(cudaDevAttrComputeCapabilityMinor, &minor);
  if (code == cudaSuccess) *compute_capability = 10 * major + minor;
  return code;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_LAUNCH_H_
