// Host side of the forward kernel, for one variant.

#ifndef JAX_MAGI_CUDA_FORWARD_LAUNCH_CUH_
#define JAX_MAGI_CUDA_FORWARD_LAUNCH_CUH_

#include <algorithm>

#include "cc/cuda/forward.h"
#include "cc/cuda/forward_kernel.cuh"
#include "cc/cuda/tensor_map.h"

namespace jax_magi::cuda {

// Keys and values of the heads worked on at once should fit here: part of the L2 cache of 50 MB.
constexpr int64_t kL2Budget = 32 << 20;

// Query heads worked on at once: whole groups, and equally many each time.
inline int HeadsPerSection(const AttentionShape& shape) {
  const int64_t num_bytes = 2 * shape.batch * shape.k_len * (shape.head_dim + shape.value_dim) + 1;
  int64_t kv_heads = std::clamp<int64_t>(kL2Budget / num_bytes, 1, shape.num_kv_heads);
  while (shape.num_kv_heads % kv_heads) --kv_heads;
  return static_cast<int>(kv_heads * shape.group());
}

template <typename Config>
Status LaunchForwardConfig(const ForwardArgs& args, void* workspace, int sm_margin,
                           cudaStream_t stream) {
  const AttentionShape& shape = args.shape;
  if (shape.batch == 0) return {};
  JAX_MAGI_CUDA_RETURN_IF_ERROR(MakeSchedule(shape, Config::kBlockM, Config::kBlockN, args.slices,
                                             workspace, args.max_logits, stream));
  ForwardParams params;
  struct {
    const void* data;
    int64_t length, heads, dim;
    int box_rows;
    CUtensorMap* map;
  } const tensors[] = {
      {args.q, shape.q_len, shape.num_q_heads, shape.head_dim, Config::kBlockM, &params.q_map},
      {args.k, shape.k_len, shape.num_kv_heads, shape.head_dim, Config::kBlockN, &params.k_map},
      {args.v, shape.k_len, shape.num_kv_heads, shape.value_dim, Config::kBlockN, &params.v_map},
  };
  for (const auto& t : tensors) {
    const Status status = MakeTensorMap(args.dtype, t.data == nullptr ? args.q : t.data,
                                        shape.batch, t.length, t.heads, t.dim, t.box_rows, t.map);
    if (status.message != nullptr) return status;
  }
  params.q_len = static_cast<int>(shape.q_len);
  params.k_len = static_cast<int>(shape.k_len);
  params.num_q_heads = static_cast<int>(shape.num_q_heads);
  params.group = static_cast<int>(shape.group());
  params.value_dim = static_cast<int>(shape.value_dim);
  params.num_slices = static_cast<int>(shape.num_slices);
  params.shared_slices = shape.shared_slices;
  params.heads_per_section = HeadsPerSection(shape);
  params.softmax_scale = args.params.softmax_scale;
  params.softcap = args.params.softcap;
  params.slices = args.slices;
  params.sink = args.sink;
  params.schedule = static_cast<ScheduleHeader*>(workspace);
  params.out = args.out;
  params.lse = args.lse;
  params.max_logits = args.max_logits;

  int device, num_sms;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  constexpr size_t kSharedBytes = sizeof(ForwardShared<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "a Hopper SM has 227 KB of shared memory");
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      ForwardKernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const int64_t num_work = MaxTiles(shape, Config::kBlockM) * params.num_q_heads;
  const int grid =
      static_cast<int>(std::clamp<int64_t>(num_sms - sm_margin, 1, std::max<int64_t>(num_work, 1)));
  ForwardKernel<Config><<<grid, Config::kNumThreads, kSharedBytes, stream>>>(params);
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return {};
}

template <int kHeadDim, int kValueDim, typename Element>
Status LaunchForward(const ForwardArgs& args, void* workspace, int sm_margin, cudaStream_t stream) {
  const auto launch = args.params.softcap == 0.0f
                          ? LaunchForwardConfig<ForwardConfig<kHeadDim, kValueDim, Element, false>>
                          : LaunchForwardConfig<ForwardConfig<kHeadDim, kValueDim, Element, true>>;
  return launch(args, workspace, sm_margin, stream);
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_FORWARD_LAUNCH_CUH_
