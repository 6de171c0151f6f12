#ifndef JAX_MAGI_CUDA_ATTENTION_EARLY_LAUNCH_H_
#define JAX_MAGI_CUDA_ATTENTION_EARLY_LAUNCH_H_

#include <cuda_runtime.h>

namespace jax_magi::cuda {

// Launches a kernel that may come up before the one before it on the stream has ended: it must call
// WaitForPreviousKernel() before it needs what that one wrote.
template <typename... Params, typename... Args>
cudaError_t LaunchEarlyInClusters(int cluster_size, void (*kernel)(Params...), int num_blocks,
                                  int num_threads, size_t shared_bytes, cudaStream_t stream,
                                  const Args&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_blocks);
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster_size > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename... Params, typename... Args>
cudaError_t LaunchEarly(void (*kernel)(Params...), int num_blocks, int num_threads,
                        size_t shared_bytes, cudaStream_t stream, const Args&... args) {
  return LaunchEarlyInClusters(1, kernel, num_blocks, num_threads, shared_bytes, stream, args...);
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_EARLY_LAUNCH_H_
