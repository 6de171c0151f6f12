// Host side of the forward kernel, for one variant.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_LAUNCH_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_LAUNCH_CUH_

#include "cc/cuda/attention/sm90/forward_kernel.cuh"
#include "cc/cuda/attention/sm90/launch.cuh"
#include "cc/cuda/attention/terms_launch.cuh"

namespace jax_magi::cuda::sm90 {

// Keys and values of the heads in progress should fit in this part of the 50 MB L2 cache.
constexpr int64_t kL2Budget = 32 << 20;

template <typename Config>
Tiling ConfigTiling(const AttentionShape& shape) {
  // If there are few queries, all tiles pack heads.
  const int most_rows = static_cast<int>(std::min<int64_t>(shape.q_len, Config::kBlockM));
  const int log2_pack = Log2Pack<Config>(most_rows, static_cast<int>(shape.group()));
  return {Architecture::kSm90, Config::kBlockM >> log2_pack, Config::kBlockN, /*by_keys=*/false,
          /*aligns_keys=*/Config::kHasTerms};
}

template <typename Config>
Status LaunchForward(const ForwardArgs& args, const LaunchOptions& options) {
  const AttentionShape& shape = args.shape;
  if (shape.batch == 0 || shape.num_kv_heads == 0) return {};
  const Tiling tiling = ConfigTiling<Config>(shape);
  const int group = static_cast<int>(shape.group());
  const int log2_pack = Log2Pack<Config>(tiling.num_rows, group), pack = 1 << log2_pack;
  // A CTA of a cluster takes one pack each.
  const int packs_per_kv_head = CeilDiv(group, pack * Config::kClusterSize);
  const int num_packs = static_cast<int>(shape.num_kv_heads) * packs_per_kv_head;
  const ForwardWorkspace workspace =
      ForwardWorkspaceOf(shape, tiling, Config::kHeadDim, Config::kValueDim, options.workspace);
  JAX_MAGI_RETURN_IF_BAD(CheckFits(workspace, options.workspace_bytes));
  static_assert(Config::kNumConsumers <= MaxConsumers(Config::kHeadDim), "for the workspace");
  const bool may_cut = Config::kCutsKeys && MayCutKeys(shape, tiling);
  JAX_MAGI_RETURN_IF_BAD(ResetWork(shape, CheckOf(shape, tiling, options, args.keeps_unseen_rows()),
                                   workspace.counter, may_cut ? kMaxPartCounters : 0,
                                   args.running_out != nullptr ? nullptr : args.max_logits,
                                   options.stream));
  if (shape.q_len == 0) return {};
  ForwardParamsOf<Config> params;
  params.parts = {};
  params.work = MakeWork(shape, tiling, args.slices, options.tile_list, workspace.counter,
                         num_packs, PacksPerSection(shape, packs_per_kv_head, kL2Budget));
  // If there are no keys, tensor maps describe these tensors, but nothing reads them.
  const void* k = args.k == nullptr ? args.q : args.k;
  const void* v = args.v == nullptr ? args.q : args.v;
  constexpr int kClusterSize = Config::kClusterSize, kBlockN = Config::kBlockN;
  JAX_MAGI_RETURN_IF_BAD(MakeTensorMaps(
      shape.batch, {{"k", args.dtype, k, shape.k_len, shape.num_kv_heads, shape.head_dim,
                     kPanelRows<kClusterSize, Config::kHeadDim, kBlockN>, 1, &params.k_map},
                    {"v", args.dtype, v, shape.k_len, shape.num_kv_heads, shape.value_dim,
                     kPanelRows<kClusterSize, Config::kValueDim, kBlockN>, 1, &params.v_map}}));
  for (int more = 0; more < ForwardParams::kNumPacks; ++more) {
    if (Log2Pack<Config>(tiling.num_rows >> more, group / Config::kClusterSize) <
        log2_pack + more) {
      break;
    }
    JAX_MAGI_RETURN_IF_BAD(MakeTensorMaps(
        shape.batch, {{"q", args.dtype, args.q, shape.q_len, shape.num_q_heads, shape.head_dim,
                       tiling.num_rows >> more, pack << more, &params.q_map[more]}}));
  }
  params.q_len = static_cast<int>(shape.q_len);
  params.num_q_heads = static_cast<int>(shape.num_q_heads);
  params.group = group;
  params.value_dim = static_cast<int>(shape.value_dim);
  params.log2_pack = log2_pack;
  params.packs_per_kv_head = packs_per_kv_head;
  params.softmax_scale = args.params.softmax_scale;
  params.softcap = args.params.softcap;
  params.sink = args.sink;
  params.out = args.out;
  params.lse = args.lse;
  params.max_logits = args.max_logits;
  const bool merges = args.running_out != nullptr && args.running_dtype == DType::kF32;
  params.running_out = merges ? static_cast<const float*>(args.running_out) : nullptr;
  params.is_rounded = args.out_dtype != DType::kF32;
  params.keeps_rows = args.running_out != nullptr && !merges;
  if (may_cut) params.parts = workspace.parts;
  if constexpr (Config::kHasTerms) {
    params.is_out_float = args.out_dtype == DType::kF32;
    params.terms = TermsOf(args);
    JAX_MAGI_RETURN_IF_BAD(CheckTerms(params.terms));
    if (params.terms.kind == BiasKind::kTiles) {
      JAX_MAGI_RETURN_IF_BAD(MakeBiasMap("bias", shape, args.bias_layout, args.bias,
                                         Config::kBlockM, &params.bias_map));
    }
  }

  constexpr size_t kSharedBytes = sizeof(ForwardShared<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "a Hopper SM has 227 KB of shared memory");
  return LaunchPersistent<ForwardKernel<Config>, Config::kClusterSize>(
      params, Config::kNumThreads, kSharedBytes,
      MaxTiles(shape, tiling) * params.work.num_repeats * num_packs *
          (may_cut ? kMaxPartsOfTile : 1),
      options);
}

// Whether tiles of 128 rows are at least as good as tiles of 192. Batch and heads do not count:
// they may be sharded after the tile list was made.
inline bool PrefersSmallTiles(const AttentionShape& shape) {
  const auto num_tiles = [&](int64_t num_rows) { return (shape.q_len + num_rows - 1) / num_rows; };
  return 3 * num_tiles(128) <= 4 * num_tiles(192);  // A small tile takes about 3/4 of the time.
}

// Whether two CTAs should form a cluster, which requires two heads of a group: each CTA loads half
// of the keys and values for both, but they begin and end together. On an H200, clusters gain up to
// 6% if each has 64 or more blocks to process (with 48 heads, all masks of 4k tokens, and full ones
// of 2k), and lose as much if each has 50 or fewer, or if tiles have 3 blocks each.
inline bool PrefersClusters(const AttentionShape& shape, const LaunchOptions& options) {
  constexpr int64_t kLeastBlocks = 60, kLeastOfTile = 4, kTileRows = 128;
  const int64_t num_clusters = options.num_sms / 2, num_blocks = options.num_blocks;
  if (shape.num_kv_heads == 0 || shape.group() % 2 != 0) return false;
  return num_blocks * shape.batch * (shape.num_q_heads / 2) >= kLeastBlocks * num_clusters &&
         num_blocks * kTileRows >= kLeastOfTile * shape.q_len;
}

// Calls use() with the configuration for the call. Clusters do not change the tiling.
template <int kHeadDim, int kValueDim, typename Element, bool kHasSoftcap, bool kIsOutFloat,
          typename Use>
auto WithTileFor(const AttentionShape& shape, bool in_clusters, Use use) {
  if constexpr (kHeadDim == 64) {
    using Small =
        ForwardConfig<kHeadDim, kValueDim, Element, kHasSoftcap, /*kIsSmall=*/true, kIsOutFloat>;
    if (PrefersSmallTiles(shape)) return use(Small());
  }
  if constexpr (kHeadDim == 128 && kValueDim == 128 && !kHasSoftcap) {
    using Cluster = ForwardConfig<kHeadDim, kValueDim, Element, kHasSoftcap, /*kIsSmall=*/false,
                                  kIsOutFloat, /*kClusterSize=*/2>;
    if (in_clusters && shape.q_len >= Cluster::kBlockM) return use(Cluster());
  }
  return use(
      ForwardConfig<kHeadDim, kValueDim, Element, kHasSoftcap, /*kIsSmall=*/false, kIsOutFloat>());
}
template <int kHeadDim, int kValueDim, typename Element, bool kIsOutFloat, typename Use>
auto WithConfig(const AttentionShape& shape, bool has_softcap, bool in_clusters, Use use) {
  return has_softcap
             ? WithTileFor<kHeadDim, kValueDim, Element, true, kIsOutFloat>(shape, in_clusters, use)
             : WithTileFor<kHeadDim, kValueDim, Element, false, kIsOutFloat>(shape, in_clusters,
                                                                             use);
}

template <int kHeadDim, int kValueDim, typename Element>
Status ForwardVariant<kHeadDim, kValueDim, Element>::Launch(const ForwardArgs& args,
                                                            const LaunchOptions& options) {
  const auto launch = [&](auto config) { return LaunchForward<decltype(config)>(args, options); };
  const bool has_softcap = args.params.softcap != 0.0f;
  const bool in_clusters = PrefersClusters(args.shape, options);
  // The kernels that write float32 also merge with the results of other calls, in any dtype.
  return args.out_dtype == DType::kF32 || args.running_out != nullptr
             ? WithConfig<kHeadDim, kValueDim, Element, true>(args.shape, has_softcap, in_clusters,
                                                              launch)
             : WithConfig<kHeadDim, kValueDim, Element, false>(args.shape, has_softcap, in_clusters,
                                                               launch);
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling ForwardVariant<kHeadDim, kValueDim, Element>::TilingOf(const AttentionCall& call) {
  return WithConfig<kHeadDim, kValueDim, Element, /*kIsOutFloat=*/false>(
      call.shape, call.has_softcap, /*in_clusters=*/false,
      [&](auto config) { return ConfigTiling<decltype(config)>(call.shape); });
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_LAUNCH_CUH_
