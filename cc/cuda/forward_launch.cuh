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

// Packs of query heads worked on at once: whole groups, and equally many each time.
inline int PacksPerSection(const AttentionShape& shape, int packs_per_kv_head) {
  const int64_t num_bytes = 2 * shape.batch * shape.k_len * (shape.head_dim + shape.value_dim) + 1;
  int64_t kv_heads = std::clamp<int64_t>(kL2Budget / num_bytes, 1, shape.num_kv_heads);
  while (shape.num_kv_heads % kv_heads) --kv_heads;
  return static_cast<int>(kv_heads) * packs_per_kv_head;
}

// Short queries would leave most of a tile empty: then it holds several query heads of a kv head.
template <typename Config>
int Log2Pack(const AttentionShape& shape) {
  int log2_pack = 0;
  while ((shape.q_len << (log2_pack + 1)) <= Config::kBlockM && (1 << log2_pack) < shape.group()) {
    ++log2_pack;
  }
  return log2_pack;
}

template <typename Config>
Tiling TilingOf(const AttentionShape& shape) {
  return {Config::kBlockM >> Log2Pack<Config>(shape), Config::kBlockN};
}

template <typename Config>
Status LaunchForwardConfig(const ForwardArgs& args, const int32_t* plan, void* workspace,
                           int sm_margin, cudaStream_t stream) {
  const AttentionShape& shape = args.shape;
  if (shape.batch == 0) return {};
  const Tiling tiling = TilingOf<Config>(shape);
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      Prepare(shape, tiling, args.slices, plan != nullptr, workspace, args.max_logits, stream));
  const int log2_pack = Log2Pack<Config>(shape), pack = 1 << log2_pack;
  ForwardParams params;
  struct {
    const void* data;
    int64_t length, heads, dim;
    int box_rows, box_heads;
    CUtensorMap* map;
  } const tensors[] = {
      {args.q, shape.q_len, shape.num_q_heads, shape.head_dim, tiling.num_rows, pack,
       &params.q_map},
      {args.k, shape.k_len, shape.num_kv_heads, shape.head_dim, Config::kBlockN, 1, &params.k_map},
      {args.v, shape.k_len, shape.num_kv_heads, shape.value_dim, Config::kBlockN, 1, &params.v_map},
  };
  for (const auto& t : tensors) {
    const Status status =
        MakeTensorMap(args.dtype, t.data == nullptr ? args.q : t.data, shape.batch, t.length,
                      t.heads, t.dim, t.box_rows, t.box_heads, t.map);
    if (status.message != nullptr) return status;
  }
  params.q_len = static_cast<int>(shape.q_len);
  params.k_len = static_cast<int>(shape.k_len);
  params.num_q_heads = static_cast<int>(shape.num_q_heads);
  params.num_kv_heads = static_cast<int>(shape.num_kv_heads);
  params.value_dim = static_cast<int>(shape.value_dim);
  params.num_slices = static_cast<int>(shape.num_slices);
  params.num_repeats = shape.shared_slices ? static_cast<int>(shape.batch) : 1;
  params.log2_pack = log2_pack;
  params.packs_per_kv_head = CeilDiv(static_cast<int>(shape.group()), pack);
  params.packs_per_section = PacksPerSection(shape, params.packs_per_kv_head);
  params.has_plan = plan != nullptr;
  params.softmax_scale = args.params.softmax_scale;
  params.softcap = args.params.softcap;
  params.slices = args.slices;
  params.sink = args.sink;
  params.counter = static_cast<WorkCounter*>(workspace);
  params.list = plan != nullptr ? reinterpret_cast<const TileList*>(plan)
                                : reinterpret_cast<const TileList*>(params.counter + 1);
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
  const int64_t num_work =
      MaxTiles(shape, tiling) * params.num_repeats * params.num_kv_heads * params.packs_per_kv_head;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(
      std::clamp<int64_t>(num_sms - sm_margin, 1, std::max<int64_t>(num_work, 1))));
  config.blockDim = dim3(Config::kNumThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaLaunchKernelEx(&config, ForwardKernel<Config>, params));
  return {};
}

template <int kHeadDim, int kValueDim, typename Element>
Status LaunchForward(const ForwardArgs& args, const int32_t* plan, void* workspace, int sm_margin,
                     cudaStream_t stream) {
  const auto launch = args.params.softcap == 0.0f
                          ? LaunchForwardConfig<ForwardConfig<kHeadDim, kValueDim, Element, false>>
                          : LaunchForwardConfig<ForwardConfig<kHeadDim, kValueDim, Element, true>>;
  return launch(args, plan, workspace, sm_margin, stream);
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling ForwardTiling(const AttentionShape& shape, bool has_softcap) {
  return has_softcap ? TilingOf<ForwardConfig<kHeadDim, kValueDim, Element, true>>(shape)
                     : TilingOf<ForwardConfig<kHeadDim, kValueDim, Element, false>>(shape);
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_FORWARD_LAUNCH_CUH_
