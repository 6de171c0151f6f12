// Programmatic dependent launch: kernels that start before the previous kernel has ended, on Hopper
// alone. On other GPUs, kernels run one after another, and these waits do nothing: later GPUs run
// code that the driver compiles from PTX of compute_80, which cannot wait.

#ifndef JAX_MAGI_CUDA_ATTENTION_EARLY_LAUNCH_CUH_
#define JAX_MAGI_CUDA_ATTENTION_EARLY_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "cc/cuda/launch.h"

namespace jax_magi::cuda {

// Lets the next kernel start while this one ends, if it was launched with LaunchEarly.
__device__ __forceinline__ void LetNextKernelStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until everything that the previous kernel wrote can be read.
__device__ __forceinline__ void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches a kernel that may start before the previous kernel on the stream has ended: it must call
// WaitForPreviousKernel() before it uses anything that kernel wrote.
template <typename... Params, typename... Args>
cudaError_t LaunchEarlyInClusters(int cluster_size, void (*kernel)(Params...), int num_blocks,
                                  int num_threads, size_t shared_bytes, cudaStream_t stream,
                                  const Args&... args) {
  // The GPUs whose code waits: CMakeLists.txt compiles it (JAX_MAGI_SHARED_ARCHITECTURES).
  constexpr int kWaits = 90;
  int compute_capability;
  const cudaError_t code = GetComputeCapability(&compute_capability);
  if (code != cudaSuccess) return code;
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
  config.numAttrs = compute_capability != kWaits ? 0 : cluster_size > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename... Params, typename... Args>
cudaError_t LaunchEarly(void (*kernel)(Params...), int num_blocks, int num_threads,
                        size_t shared_bytes, cudaStream_t stream, const Args&... args) {
  return LaunchEarlyInClusters(1, kernel, num_blocks, num_threads, shared_bytes, stream, args...);
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_EARLY_LAUNCH_CUH_
