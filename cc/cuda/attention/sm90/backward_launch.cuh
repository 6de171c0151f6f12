// Host side of the backward kernel, for one variant.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_LAUNCH_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_LAUNCH_CUH_

#include "cc/cuda/attention/backward_finish.h"
#include "cc/cuda/attention/backward_prepare.h"
#include "cc/cuda/attention/backward_sections.h"
#include "cc/cuda/attention/sm90/backward_kernel.cuh"
#include "cc/cuda/attention/sm90/launch.cuh"
#include "cc/cuda/attention/terms_launch.cuh"

namespace jax_magi::cuda::sm90 {

template <typename Config>
constexpr Tiling kBackwardTiling = {Architecture::kSm90, Config::kClusterSize * Config::kBlockRows,
                                    Config::kBlockColumns, /*by_keys=*/true,
                                    /*aligns_keys=*/Config::kHasTerms};

// `gradients` is for calls with terms.
template <typename Config>
Status LaunchBackwardKernel(const BackwardArgs& args, const BackwardWorkspace& workspace,
                            const LaunchOptions& options, const TermGradients& gradients = {}) {
  const AttentionShape& shape = args.shape;
  const DqOrder& order = workspace.order;
  const int num_parts = workspace.parts.num_parts;
  constexpr Tiling kTiling = kBackwardTiling<Config>;
  const int num_kv_heads = static_cast<int>(shape.num_kv_heads);
  if (num_kv_heads == 0) return {};
  const int num_packs = num_kv_heads * num_parts;
  const int heads_per_section =
      HeadsPerSection(shape, kTiling, num_parts, order.is_fixed(), Config::kClusterSize, options);
  if (order.is_fixed()) {
    constexpr DqSteps kSteps{Config::kBlockColumns, Config::kDqQueries};
    JAX_MAGI_RETURN_IF_BAD(
        MakeDqOrder(shape, kTiling, args.slices, options.tile_list, kSteps, order, options.stream));
  }
  BackwardParamsOf<Config> params;
  params.work = MakeWork(shape, kTiling, args.slices, options.tile_list, workspace.counter,
                         num_packs, heads_per_section * num_parts);

  // If there are no queries, tensor maps describe these tensors, but nothing reads them.
  const void* q = args.q == nullptr ? args.k : args.q;
  const void* dout = args.dout == nullptr ? args.v : args.dout;
  const int64_t q_len = shape.q_len, k_len = shape.k_len, num_q_heads = shape.num_q_heads;
  // The rows of TMA boxes.
  constexpr int kRows = Config::kBlockRows;
  constexpr int kColumns =
      kPanelRows<Config::kClusterSize, Config::kHeadDim, Config::kBlockColumns>;
  JAX_MAGI_RETURN_IF_BAD(MakeTensorMaps(
      shape.batch,
      {{"k", args.dtype, args.k, k_len, num_kv_heads, shape.head_dim, kRows, 1, &params.row_x_map,
        2 * Config::kRowPanelDims},
       {"v", args.dtype, args.v, k_len, num_kv_heads, shape.value_dim, kRows, 1, &params.row_y_map},
       {"q", args.dtype, q, q_len, num_q_heads, shape.head_dim, kColumns, 1, &params.column_x_map},
       {"dout", args.dtype, dout, q_len, num_q_heads, shape.value_dim, kColumns, 1,
        &params.column_y_map}}));
  params.dq_sum = workspace.sum.data;
  params.dq_sum_rows = DqSumRows(shape.q_len);
  params.dq_order = order;
  params.batch = static_cast<int>(shape.batch);
  params.q_len = static_cast<int>(shape.q_len);
  params.num_q_heads = static_cast<int>(shape.num_q_heads);
  params.group = static_cast<int>(shape.group());
  params.num_kv_heads = num_kv_heads;
  params.packs_per_kv_head = num_parts;
  params.heads_per_pack = params.group / num_parts;
  params.columns_per_head = ColumnsPerHead(order.is_fixed(), Config::kBlockColumns);
  params.head_dim = static_cast<int>(shape.head_dim);
  params.value_dim = static_cast<int>(shape.value_dim);
  params.softmax_scale = args.params.softmax_scale;
  params.softcap = args.params.softcap;
  params.statistics = workspace.statistics;
  params.padded_queries = PaddedQueries(shape.q_len);
  params.dx = args.dk;
  params.dy = args.dv;
  params.is_float = args.dkv_dtype == DType::kF32;
  int parts_of_tile = num_packs;
  if constexpr (Config::kCutsHeads) {
    params.head_cuts = {HeadCuts(params.group), TileWeightsOf(shape, options.num_sms),
                        static_cast<uint32_t>(params.group), static_cast<uint32_t>(num_kv_heads),
                        static_cast<uint32_t>(WorkPerSection(options))};
    parts_of_tile *= static_cast<int>(params.head_cuts.cuts.num_parts[0]);
  }
  if constexpr (Config::kHasTerms) {
    params.terms = TermsOf(args);
    params.gradients = gradients;
    JAX_MAGI_RETURN_IF_BAD(CheckTerms(params.terms));
    if (Config::kBiasByTma && params.terms.kind == BiasKind::kTiles) {
      JAX_MAGI_RETURN_IF_BAD(MakeBiasMap("bias", shape, args.bias_layout, args.bias,
                                         Config::kBlockColumns, &params.bias_map));
    }
    if (Config::kBiasByTma && gradients.dbias != nullptr) {
      JAX_MAGI_RETURN_IF_BAD(MakeBiasMap("dbias", shape, args.bias_layout, gradients.dbias,
                                         Config::kBlockColumns, &params.dbias_map));
    }
  }

  constexpr size_t kSharedBytes = sizeof(BackwardShared<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "a Hopper SM has 227 KB of shared memory");
  return LaunchPersistent<BackwardKernel<Config>, Config::kClusterSize>(
      params, Config::kNumThreads, kSharedBytes,
      MaxTiles(shape, kTiling) * params.work.num_repeats * parts_of_tile, options);
}

template <typename Config>
Status LaunchBackward(const BackwardArgs& call, int num_parts, bool deterministic,
                      const LaunchOptions& options) {
  const AttentionShape& shape = call.shape;
  if (shape.batch == 0) return {};
  constexpr int kNumDims = Config::kHeadDim;
  static_assert(DqPanelDims(kNumDims) == Config::kDqPanelDims, "as the sum has them");
  if (call.dq_sum != nullptr && call.dq_sum_words != DqSumWords(shape, kNumDims)) {
    return {"the sum of dq has another size than this kernel's", __FILE__, __LINE__};
  }
  BackwardWorkspace workspace =
      BackwardWorkspaceOf(CallOf(call, deterministic, options.target), kBackwardTiling<Config>,
                          kNumDims, num_parts, options.workspace);
  JAX_MAGI_RETURN_IF_BAD(CheckFits(workspace, options.workspace_bytes));
  if (call.dq_sum != nullptr) workspace.sum.data = call.dq_sum;
  const BackwardArgs args = WithParts(call, workspace.parts);
  AddedTiles added{};
  if constexpr (Config::kCutsHeads) {
    added = {options.tile_list, TileWeightsOf(shape, options.num_sms),
             NumCutWeights(HeadCuts(static_cast<int>(shape.group()))),
             kBackwardTiling<Config>.num_rows};
  }
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      PrepareBackward(args, CheckOf(shape, kBackwardTiling<Config>, options), workspace.zeros,
                      added, workspace.statistics, workspace.counter, options.stream));
  if (shape.k_len > 0) {
    JAX_MAGI_RETURN_IF_BAD(LaunchBackwardKernel<Config>(args, workspace, options));
  }
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      FinishBackward(call, workspace.sum, workspace.parts, options.stream));
  return {};
}

// Calls use() with the configuration for the call. If no configuration with clusters exists, it is
// one without.
template <int kHeadDim, int kValueDim, typename Element, typename Use>
auto WithBackwardConfig(bool has_softcap, bool in_clusters, bool cuts_heads, Use use) {
  const auto with_cuts = [&](auto softcap) {
    constexpr bool kHasSoftcap = decltype(softcap)::value;
    using Tile = BackwardTile<kHeadDim, kValueDim, kHasSoftcap>;
    if (cuts_heads) {
      return use(BackwardConfig<kHeadDim, kValueDim, Element, kHasSoftcap, Tile, 1, true>());
    }
    return use(BackwardConfig<kHeadDim, kValueDim, Element, kHasSoftcap>());
  };
  if (has_softcap) return with_cuts(std::true_type());
  if constexpr (kHeadDim <= 128) {
    using Tile = BackwardTile<kHeadDim, kValueDim, false>;
    if (in_clusters) return use(BackwardConfig<kHeadDim, kValueDim, Element, false, Tile, 2>());
  }
  return with_cuts(std::false_type());
}

template <int kHeadDim, int kValueDim, typename Element>
Status BackwardVariant<kHeadDim, kValueDim, Element>::Launch(const BackwardArgs& args,
                                                             int num_parts, bool deterministic,
                                                             const LaunchOptions& options) {
  return WithBackwardConfig<kHeadDim, kValueDim, Element>(
      args.params.softcap != 0.0f, options.in_clusters, options.cuts_heads, [&](auto config) {
        return LaunchBackward<decltype(config)>(args, num_parts, deterministic, options);
      });
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling BackwardVariant<kHeadDim, kValueDim, Element>::TilingOf(const AttentionCall& call) {
  return WithBackwardConfig<kHeadDim, kValueDim, Element>(
      call.has_softcap, /*in_clusters=*/false, /*cuts_heads=*/false,
      [](auto config) { return kBackwardTiling<decltype(config)>; });
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling BackwardVariant<kHeadDim, kValueDim, Element>::ClusterTilingOf(const AttentionCall& call) {
  return WithBackwardConfig<kHeadDim, kValueDim, Element>(
      call.has_softcap, /*in_clusters=*/true, /*cuts_heads=*/false,
      [](auto config) { return kBackwardTiling<decltype(config)>; });
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_LAUNCH_CUH_
