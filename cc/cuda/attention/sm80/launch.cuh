// What the launches of the forward and the backward kernel share.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_LAUNCH_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_LAUNCH_CUH_

#include <algorithm>
#include <atomic>

#include "cc/cuda/attention/sm80/variants.h"
#include "cc/cuda/attention/workspace.h"
#include "cc/cuda/launch.h"

namespace jax_magi::cuda::sm80 {

// What a kernel of this many threads and bytes of shared memory gets from the current device.
struct KernelSlots {
  int num_sms, ctas_per_sm;
};

// Sets how much shared memory a kernel takes, once per device.
template <auto kKernel>
Status SetUpKernel(int num_threads, size_t shared_bytes, KernelSlots* slots) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];  // num_sms << 8 | ctas_per_sm; 0: not set up yet.
  int device;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  if (device >= kMaxDevices) return {"there are more than 64 devices", __FILE__, __LINE__};
  int both = known[device].load(std::memory_order_acquire);
  if (both == 0) {
    JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
        kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
    // The most shared memory for the SM, not only for one CTA.
    JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
        kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    int num_sms, ctas_per_sm;
    JAX_MAGI_CUDA_RETURN_IF_ERROR(GetNumSms(&num_sms));
    JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &ctas_per_sm, kKernel, num_threads, shared_bytes));
    if (ctas_per_sm == 0) {
      return {"the kernel needs more registers or shared memory than an SM has", __FILE__,
              __LINE__};
    }
    both = num_sms << 8 | ctas_per_sm;
    known[device].store(both, std::memory_order_release);
  }
  *slots = {both >> 8, both & 255};
  return {};
}

// Launches a kernel with as many CTAs as run at a time on the SMs that it may use, but not more
// than there is work. It starts after the previous kernel has ended: what is compiled from PTX of
// compute_80 has no instruction to wait for it.
template <auto kKernel, typename Params>
Status LaunchPersistent(const Params& params, int num_threads, size_t shared_bytes,
                        int64_t max_work, const LaunchOptions& options) {
  KernelSlots slots;
  JAX_MAGI_RETURN_IF_BAD(SetUpKernel<kKernel>(num_threads, shared_bytes, &slots));
  const int num_sms = std::max(slots.num_sms - options.sm_margin, 1);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::clamp<int64_t>(
      int64_t{num_sms} * slots.ctas_per_sm, 1, std::max<int64_t>(max_work, 1))));
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = options.stream;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaLaunchKernelEx(&config, kKernel, params));
  return {};
}

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_LAUNCH_CUH_
