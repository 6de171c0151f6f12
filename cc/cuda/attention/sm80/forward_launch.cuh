// Host side of the forward kernel, for one variant.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_LAUNCH_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_LAUNCH_CUH_

#include "cc/cuda/attention/sm80/forward_kernel.cuh"
#include "cc/cuda/attention/sm80/launch.cuh"
#include "cc/cuda/attention/terms_launch.cuh"

namespace jax_magi::cuda::sm80 {

template <typename Config>
Tiling ForwardTiling() {
  return {Architecture::kSm80, Config::kBlockM, Config::kBlockN, /*by_keys=*/false,
          /*aligns_keys=*/Config::kHasTerms};
}

template <typename Config>
Status LaunchForward(const ForwardArgs& args, const LaunchOptions& options) {
  const AttentionShape& shape = args.shape;
  if (shape.batch == 0 || shape.num_kv_heads == 0) return {};
  const Tiling tiling = ForwardTiling<Config>();
  const ForwardWorkspace workspace =
      ForwardWorkspaceOf(shape, tiling, Config::kHeadDim, Config::kValueDim, options.workspace);
  JAX_MAGI_RETURN_IF_BAD(CheckFits(workspace, options.workspace_bytes));
  static_assert(Config::kNumConsumers <= MaxConsumers(Config::kHeadDim), "for the workspace");
  const bool may_cut = MayCutKeys(shape, tiling);
  JAX_MAGI_RETURN_IF_BAD(ResetWork(shape, CheckOf(shape, tiling, options, args.keeps_unseen_rows()),
                                   workspace.counter, may_cut ? kMaxPartCounters : 0,
                                   args.running_out != nullptr ? nullptr : args.max_logits,
                                   options.stream));
  if (shape.q_len == 0) return {};
  const int num_heads = static_cast<int>(shape.num_q_heads);
  int num_l2_bytes;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(GetAttribute(cudaDevAttrL2CacheSize, &num_l2_bytes));
  ForwardParamsOf<Config> params;
  params.q = args.q;
  params.k = args.k;
  params.v = args.v;
  // Keys and values of the heads in progress share the L2 cache with queries and the output.
  params.work =
      MakeWork(shape, tiling, args.slices, options.tile_list, workspace.counter, num_heads,
               PacksPerSection(shape, static_cast<int>(shape.group()), num_l2_bytes / 8 * 5));
  params.q_len = static_cast<int>(shape.q_len);
  params.k_len = static_cast<int>(shape.k_len);
  params.num_q_heads = num_heads;
  params.num_kv_heads = static_cast<int>(shape.num_kv_heads);
  params.group = static_cast<int>(shape.group());
  params.head_dim = static_cast<int>(shape.head_dim);
  params.value_dim = static_cast<int>(shape.value_dim);
  params.softmax_scale = args.params.softmax_scale;
  params.softcap = args.params.softcap;
  params.sink = args.sink;
  params.out = args.out;
  params.lse = args.lse;
  params.max_logits = args.max_logits;
  params.parts = may_cut ? workspace.parts : PartsParams{};
  const bool merges = args.running_out != nullptr && args.running_dtype == DType::kF32;
  params.running_out = merges ? static_cast<const float*>(args.running_out) : nullptr;
  params.is_rounded = args.out_dtype != DType::kF32;
  params.keeps_rows = args.running_out != nullptr && !merges;
  if constexpr (Config::kHasTerms) {
    params.is_out_float = args.out_dtype == DType::kF32;
    params.terms = TermsOf(args);
  }
  constexpr size_t kSharedBytes = sizeof(ForwardShared<Config>);
  static_assert(kSharedBytes <= Config::kMaxSharedBytes, "a tile must fit");
  return LaunchPersistent<ForwardKernel<Config>>(params, Config::kNumThreads, kSharedBytes,
                                                 MaxTiles(shape, tiling) * params.work.num_repeats *
                                                     num_heads * (may_cut ? kMaxPartsOfTile : 1),
                                                 options);
}

// Calls use() with the tile for GPUs with this shared memory.
template <int kHeadDim, int kValueDim, typename Use>
auto WithForwardTile(const Target& target, Use use) {
  if constexpr (kHeadDim > 192) {
    if (target.shared_memory_bytes >= kRoomForTwo) return use(ForwardPairTile<4>());
    if (target.shared_memory_bytes >= kMuchSharedMemory) return use(ForwardPairTile<8>());
  }
  return use(ForwardTile<kHeadDim, kValueDim>());
}

template <int kHeadDim, int kValueDim, typename Element>
Status ForwardVariant<kHeadDim, kValueDim, Element>::Launch(const ForwardArgs& args,
                                                            const LaunchOptions& options) {
  return WithForwardTile<kHeadDim, kValueDim>(options.target, [&](auto tile) {
    using Tile = decltype(tile);
    return args.params.softcap != 0.0f
               ? LaunchForward<ForwardConfig<kHeadDim, kValueDim, Element, true, Tile>>(args,
                                                                                        options)
               : LaunchForward<ForwardConfig<kHeadDim, kValueDim, Element, false, Tile>>(args,
                                                                                         options);
  });
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling ForwardVariant<kHeadDim, kValueDim, Element>::TilingOf(const AttentionCall& call) {
  // The same with a cap.
  return WithForwardTile<kHeadDim, kValueDim>(call.target, [&](auto tile) {
    return ForwardTiling<ForwardConfig<kHeadDim, kValueDim, Element, false, decltype(tile)>>();
  });
}

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_LAUNCH_CUH_
