// What the launches of the forward and the backward kernel share.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_LAUNCH_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_LAUNCH_CUH_

#include <algorithm>
#include <atomic>

#include "cc/cuda/attention/early_launch.cuh"
#include "cc/cuda/attention/score_terms.cuh"
#include "cc/cuda/attention/sm90/pipeline.cuh"
#include "cc/cuda/attention/sm90/tensor_map.h"
#include "cc/cuda/attention/sm90/variants.h"
#include "cc/cuda/attention/workspace.h"

namespace jax_magi::cuda::sm90 {

// Sets how much shared memory a kernel takes, once per device. Returns the device's number of SMs.
template <auto kKernel>
Status SetUpKernel(size_t shared_bytes, int* num_sms) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];  // 0: not set up yet.
  int device;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  if (device >= kMaxDevices) return {"there are more than 64 devices", __FILE__, __LINE__};
  *num_sms = known[device].load(std::memory_order_acquire);
  if (*num_sms > 0) return {};
  int reserved_bytes;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&reserved_bytes, cudaDevAttrReservedSharedMemoryPerBlock, device));
  if (reserved_bytes != kReservedBytes) {
    return {"the driver reserves another part of shared memory than 1024 bytes", __FILE__,
            __LINE__};
  }
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device));
  known[device].store(*num_sms, std::memory_order_release);
  return {};
}

// Launches a persistent kernel that may start before the kernel that prepares its work has ended.
//
// The kernel may read q, k, v, slices and the list, and write out, before griddepcontrol.wait. The
// previous kernel on the stream is one of our own (ResetKernel, PrepareBackwardKernel or
// DqOrderKernel). Every CTA of it first waits until everything before it is complete and can be
// read, and only then lets the next kernel start; the next kernel starts when all CTAs have done
// so. Therefore all kernels that wrote the operands have ended before this one begins, and so have
// all kernels that read the memory it writes. This kernel must wait only for what the previous one
// writes: counters, max_logits, statistics, zeros and turns.
template <auto kKernel, int kClusterSize = 1, typename Params>
Status LaunchPersistent(const Params& params, int num_threads, size_t shared_bytes,
                        int64_t max_work, const LaunchOptions& options) {
  int num_sms;
  JAX_MAGI_RETURN_IF_BAD(SetUpKernel<kKernel>(shared_bytes, &num_sms));
  const int num_clusters = static_cast<int>(std::clamp<int64_t>(
      (num_sms - options.sm_margin) / kClusterSize, 1, std::max<int64_t>(max_work, 1)));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(LaunchEarlyInClusters(kClusterSize, kKernel,
                                                      num_clusters * kClusterSize, num_threads,
                                                      shared_bytes, options.stream, params));
  return {};
}

// A tensor for TMA, and the boxes in which it is transferred.
struct TensorBox {
  const char* name;
  DType dtype;
  const void* data;
  int64_t length, heads, dim;
  int box_rows, box_heads;
  CUtensorMap* map;
  int box_bytes = 128;
};

inline Status MakeTensorMaps(int64_t batch, std::initializer_list<TensorBox> tensors) {
  for (const TensorBox& t : tensors) {
    JAX_MAGI_RETURN_IF_BAD(MakeTensorMap(t.name, t.dtype, t.data, batch, t.length, t.heads, t.dim,
                                         t.box_rows, t.box_heads, t.box_bytes, t.map));
  }
  return {};
}

inline Status CheckTerms(const ScoreTerms& terms) {
  if (terms.kind != BiasKind::kFloat || terms.is_float) return {};
  return {"a bias of 16-bit elements for each query must have a multiple of 8 keys", __FILE__,
          __LINE__};
}

// Makes a map for boxes of 64 keys by `box_queries` queries of a bias with this layout, or of its
// gradient.
inline Status MakeBiasMap(const char* name, const AttentionShape& shape, const BiasLayout& layout,
                          const void* bias, int box_queries, CUtensorMap* map) {
  return MakeTensorMap(name, layout.dtype, bias, layout.batch_stride == 0 ? 1 : shape.batch,
                       layout.head_stride == 0 ? 1 : shape.num_q_heads, shape.q_len, shape.k_len,
                       /*box_rows=*/1, /*box_heads=*/box_queries, /*box_bytes=*/128, map);
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_LAUNCH_CUH_
