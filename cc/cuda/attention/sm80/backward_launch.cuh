// Host side of the backward kernel, for one variant.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_LAUNCH_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_LAUNCH_CUH_

#include "cc/cuda/attention/backward_finish.h"
#include "cc/cuda/attention/backward_prepare.h"
#include "cc/cuda/attention/backward_sections.h"
#include "cc/cuda/attention/sm80/backward_kernel.cuh"
#include "cc/cuda/attention/sm80/launch.cuh"
#include "cc/cuda/attention/sm80/variants.h"
#include "cc/cuda/attention/terms_launch.cuh"
#include "cc/cuda/attention/workspace.h"

namespace jax_magi::cuda::sm80 {

template <typename Config>
constexpr Tiling kBackwardTiling = {Architecture::kSm80, Config::kKeys, Config::kQueries,
                                    /*by_keys=*/true, /*aligns_keys=*/Config::kHasTerms};

// `gradients` is for calls with terms.
template <typename Config>
BackwardParamsOf<Config> ParamsOf(const BackwardArgs& args, const BackwardWorkspace& workspace,
                                  const LaunchOptions& options, const TermGradients& gradients) {
  const AttentionShape& shape = args.shape;
  constexpr Tiling kTiling = kBackwardTiling<Config>;
  const bool is_fixed = workspace.order.is_fixed();
  const int num_parts = workspace.parts.num_parts;
  const int num_packs = static_cast<int>(shape.num_kv_heads) * num_parts;
  const int heads_per_section =
      HeadsPerSection(shape, kTiling, num_parts, is_fixed, /*cluster_size=*/1, options);
  BackwardParamsOf<Config> params{};
  params.q = args.q;
  params.k = args.k;
  params.v = args.v;
  params.dout = args.dout;
  params.dq_sum = workspace.sum.data;
  params.dq_sum_rows = DqSumRows(shape.q_len);
  params.dq_order = workspace.order;
  params.work = MakeWork(shape, kTiling, args.slices, options.tile_list, workspace.counter,
                         num_packs, heads_per_section * num_parts);
  const int group = static_cast<int>(shape.group());
  params.walk = {group, group / num_parts, num_parts, ColumnsPerHead(is_fixed, Config::kQueries)};
  params.batch = static_cast<int>(shape.batch);
  params.q_len = static_cast<int>(shape.q_len);
  params.k_len = static_cast<int>(shape.k_len);
  params.num_q_heads = static_cast<int>(shape.num_q_heads);
  params.num_kv_heads = static_cast<int>(shape.num_kv_heads);
  params.head_dim = static_cast<int>(shape.head_dim);
  params.value_dim = static_cast<int>(shape.value_dim);
  params.softmax_scale = args.params.softmax_scale;
  if constexpr (Config::kHasTerms) {
    params.terms = TermsOf(args);
    params.gradients = gradients;
    params.scale = params.terms.scale;
  } else {
    const float cap = args.params.softcap;
    params.scale = cap == 0.0f ? SoftmaxScale{params.softmax_scale * kLog2E, 0.0f}
                               : SoftmaxScale{cap * kLog2E, params.softmax_scale / cap};
  }
  params.statistics = workspace.statistics;
  params.padded_queries = PaddedQueries(shape.q_len);
  params.dk = args.dk;
  params.dv = args.dv;
  params.is_float = args.dkv_dtype == DType::kF32;
  return params;
}

template <typename Config>
Status LaunchBackwardKernel(const BackwardArgs& args, const BackwardWorkspace& workspace,
                            const LaunchOptions& options, const TermGradients& gradients) {
  if (args.shape.num_kv_heads == 0) return {};
  constexpr Tiling kTiling = kBackwardTiling<Config>;
  if (workspace.order.is_fixed()) {
    constexpr DqSteps kSteps{Config::kQueries, Config::kQueries};
    JAX_MAGI_RETURN_IF_BAD(MakeDqOrder(args.shape, kTiling, args.slices, options.tile_list, kSteps,
                                       workspace.order, options.stream));
  }
  const auto params = ParamsOf<Config>(args, workspace, options, gradients);
  constexpr size_t kSharedBytes = sizeof(BackwardShared<Config>);
  static_assert(kSharedBytes <= Config::kMaxSharedBytes, "as the tile was chosen");
  return LaunchPersistent<BackwardKernel<Config>>(
      params, Config::kThreads, kSharedBytes,
      MaxTiles(args.shape, kTiling) * params.work.work_per_tile, options);
}

template <typename Config>
Status LaunchBackward(const BackwardArgs& call, int num_parts, bool deterministic,
                      const LaunchOptions& options) {
  const AttentionShape& shape = call.shape;
  if (shape.batch == 0) return {};
  constexpr int kNumDims = Config::kHeadDim;
  if (call.dq_sum != nullptr && call.dq_sum_words != DqSumWords(shape, kNumDims)) {
    return {"the sum of dq has another size than this kernel's", __FILE__, __LINE__};
  }
  constexpr Tiling kTiling = kBackwardTiling<Config>;
  BackwardWorkspace workspace = BackwardWorkspaceOf(
      CallOf(call, deterministic, options.target), kTiling, kNumDims, num_parts, options.workspace);
  JAX_MAGI_RETURN_IF_BAD(CheckFits(workspace, options.workspace_bytes));
  if (call.dq_sum != nullptr) workspace.sum.data = call.dq_sum;
  const BackwardArgs args = WithParts(call, workspace.parts);
  TermGradients gradients{};
  if constexpr (Config::kHasTerms) {
    JAX_MAGI_CUDA_RETURN_IF_ERROR(PrepareTermGradients(
        args, workspace.term_sums, /*can_zero_hidden=*/false, options.stream, &gradients));
  }
  JAX_MAGI_CUDA_RETURN_IF_ERROR(PrepareBackward(args, CheckOf(shape, kTiling, options),
                                                workspace.zeros, /*added=*/{}, workspace.statistics,
                                                workspace.counter, options.stream));
  if (shape.k_len > 0) {
    JAX_MAGI_RETURN_IF_BAD(LaunchBackwardKernel<Config>(args, workspace, options, gradients));
  }
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      FinishBackward(call, workspace.sum, workspace.parts, options.stream));
  if constexpr (Config::kHasTerms) {
    JAX_MAGI_CUDA_RETURN_IF_ERROR(FinishTermGradients(args, gradients, options.stream));
  }
  return {};
}

// Calls use() with the configuration for a call.
template <int kHeadDim, int kValueDim, typename Element, typename Use>
auto WithBackwardConfig(bool has_softcap, const Target& target, Use use) {
  const auto with_softcap = [&](auto softcap) {
    constexpr bool kHasSoftcap = decltype(softcap)::value;
    using Much = BackwardConfig<kHeadDim, kValueDim, Element, kHasSoftcap, true>;
    using Little = BackwardConfig<kHeadDim, kValueDim, Element, kHasSoftcap, false>;
    if constexpr (Much::kMaxSharedBytes > Little::kMaxSharedBytes) {
      if (target.shared_memory_bytes >= Much::kMaxSharedBytes) return use(Much());
    }
    return use(Little());
  };
  if (has_softcap) return with_softcap(std::true_type());
  return with_softcap(std::false_type());
}

template <int kHeadDim, int kValueDim, typename Element>
Status BackwardVariant<kHeadDim, kValueDim, Element>::Launch(const BackwardArgs& args,
                                                             int num_parts, bool deterministic,
                                                             const LaunchOptions& options) {
  return WithBackwardConfig<kHeadDim, kValueDim, Element>(
      args.params.softcap != 0.0f, options.target, [&](auto config) {
        return LaunchBackward<decltype(config)>(args, num_parts, deterministic, options);
      });
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling BackwardVariant<kHeadDim, kValueDim, Element>::TilingOf(const AttentionCall& call) {
  return WithBackwardConfig<kHeadDim, kValueDim, Element>(
      call.has_softcap, call.target, [](auto config) { return kBackwardTiling<decltype(config)>; });
}

template <int kHeadDim, int kValueDim, typename Element>
Status BackwardTermsVariant<kHeadDim, kValueDim, Element>::Launch(const BackwardArgs& args,
                                                                  int num_parts, bool deterministic,
                                                                  const LaunchOptions& options) {
  return LaunchBackward<BackwardTermsConfig<kHeadDim, kValueDim, Element>>(args, num_parts,
                                                                           deterministic, options);
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling BackwardTermsVariant<kHeadDim, kValueDim, Element>::TilingOf(const AttentionCall&) {
  return kBackwardTiling<BackwardTermsConfig<kHeadDim, kValueDim, Element>>;
}

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_LAUNCH_CUH_
