// Host side of the backward kernel, for one variant.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_LAUNCH_CUH_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_LAUNCH_CUH_

#include <limits>
#include <utility>

#include "cc/cuda/attention/backward_finish.h"
#include "cc/cuda/attention/backward_kernel.cuh"
#include "cc/cuda/attention/backward_prepare.h"
#include "cc/cuda/attention/terms_launch.cuh"

namespace jax_magi::cuda {

template <typename Config>
constexpr Tiling kBackwardTiling = {Config::kBlockRows, Config::kBlockColumns, Config::kByKeys,
                                    /*aligns_keys=*/Config::kHasTerms};

// About as much work at once as blocks of threads that run at once, and no more: they then read the
// same queries at about the same time.
constexpr int64_t kWorkPerSection = 2 * 132;
// Columns that are worked on for all query heads in turn before the next: more than a usual window,
// and few enough to stay in the L2 cache. With a fixed order of additions, tiles that begin late
// under a causal mask wait the longer the more these are.
constexpr int kColumnsPerHead = 2048, kColumnsPerHeadInOrder = 640;

// The last argument is for calls with terms.
template <typename Config>
Status LaunchBackwardPart(const BackwardArgs& args, int num_parts, const QueryStatistic* statistics,
                          float* dq_sum, const DqOrder& order, const LaunchOptions& options,
                          const TermGradients& gradients = {}) {
  const AttentionShape& shape = args.shape;
  constexpr Tiling kTiling = kBackwardTiling<Config>;
  const int num_row_heads =
      static_cast<int>(Config::kByKeys ? shape.num_kv_heads : shape.num_q_heads);
  if (num_row_heads == 0) return {};
  const int num_packs = num_row_heads * num_parts;
  const int64_t num_tiles =
      std::max<int64_t>(shape.batch * CeilDiv(NumRows(shape, kTiling), kTiling.num_rows), 1);
  const bool is_ordered = order.done != nullptr;
  const int64_t most_work = is_ordered ? std::numeric_limits<int64_t>::max() : kWorkPerSection;
  int64_t heads_per_section =
      std::clamp<int64_t>(most_work / (num_tiles * num_parts), 1, num_row_heads);
  while (num_row_heads % heads_per_section) --heads_per_section;
  auto* counter = static_cast<WorkCounter*>(options.workspace);
  if (is_ordered) {
    constexpr DqSteps kSteps{Config::kBlockColumns, Config::kDqQueries};
    JAX_MAGI_RETURN_IF_BAD(
        MakeDqOrder(shape, kTiling, args.slices, options.tile_list, kSteps, order, options.stream));
  }
  BackwardParamsOf<Config> params;
  params.work = MakeWork(shape, kTiling, args.slices, options.tile_list, counter, num_packs,
                         static_cast<int>(heads_per_section) * num_parts, /*is_ready=*/false);

  // Queries or keys, by their role.
  struct Side {
    const void *x, *y;
    int64_t length, heads;
  };
  const Side queries{args.q, args.dout, shape.q_len, shape.num_q_heads};
  const Side keys{args.k, args.v, shape.k_len, shape.num_kv_heads};
  const Side& rows = Config::kByKeys ? keys : queries;
  const Side& columns = Config::kByKeys ? queries : keys;
  // Without columns, these are described but never read.
  const void* column_x = columns.x == nullptr ? rows.x : columns.x;
  const void* column_y = columns.y == nullptr ? rows.y : columns.y;
  JAX_MAGI_RETURN_IF_BAD(MakeTensorMaps(
      shape.batch, {{args.dtype, rows.x, rows.length, rows.heads, shape.head_dim,
                     Config::kBlockRows, 1, &params.row_x_map},
                    {args.dtype, rows.y, rows.length, rows.heads, shape.value_dim,
                     Config::kBlockRows, 1, &params.row_y_map},
                    {args.dtype, column_x, columns.length, columns.heads, shape.head_dim,
                     Config::kBlockColumns, 1, &params.column_x_map},
                    {args.dtype, column_y, columns.length, columns.heads, shape.value_dim,
                     Config::kBlockColumns, 1, &params.column_y_map}}));
  params.dq_sum = dq_sum;
  params.dq_sum_rows = DqSumRows(shape.q_len);
  params.dq_order = order;
  params.batch = static_cast<int>(shape.batch);
  params.q_len = static_cast<int>(shape.q_len);
  params.num_q_heads = static_cast<int>(shape.num_q_heads);
  params.group = static_cast<int>(shape.group());
  params.num_row_heads = num_row_heads;
  params.packs_per_row_head = num_parts;
  params.heads_per_pack = Config::kByKeys ? params.group / num_parts : 1;
  const int per_head = is_ordered ? kColumnsPerHeadInOrder : kColumnsPerHead;
  params.columns_per_head = per_head / Config::kBlockColumns * Config::kBlockColumns;
  params.head_dim = static_cast<int>(shape.head_dim);
  params.value_dim = static_cast<int>(shape.value_dim);
  params.softmax_scale = args.params.softmax_scale;
  params.softcap = args.params.softcap;
  params.statistics = statistics;
  params.padded_queries = PaddedQueries(shape.q_len);
  params.dx = Config::kByKeys ? args.dk : args.dq;
  params.dy = Config::kByKeys ? args.dv : nullptr;
  params.is_float = (Config::kByKeys ? args.dkv_dtype : args.dq_dtype) == DType::kF32;
  if constexpr (Config::kHasTerms) {
    params.terms = TermsOf(args);
    params.gradients = gradients;
    JAX_MAGI_RETURN_IF_BAD(CheckTerms(params.terms));
    if (params.terms.kind == BiasKind::kTiles) {
      constexpr int kQueries = Config::kByKeys ? Config::kBlockColumns : Config::kBlockRows;
      JAX_MAGI_RETURN_IF_BAD(
          MakeBiasMap(shape, args.bias_layout, args.bias, kQueries, &params.bias_map));
    }
    if (gradients.dbias != nullptr) {
      JAX_MAGI_RETURN_IF_BAD(MakeBiasMap(shape, args.bias_layout, gradients.dbias,
                                         Config::kBlockColumns, &params.dbias_map));
    }
  }

  constexpr size_t kSharedBytes = sizeof(BackwardShared<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "a Hopper SM has 227 KB of shared memory");
  return LaunchPersistent<BackwardKernel<Config>>(
      params, Config::kNumThreads, kSharedBytes,
      MaxTiles(shape, kTiling) * params.work.num_repeats * num_packs, options);
}

// The workspace: the sum of dq, its order, parts of dk and dv, statistics, and the rest: the
// counter, and what calls with terms have there.
struct BackwardBuffers {
  BackwardArgs args;  // dk and dv are parts, where there are several.
  DqSum sum;
  DqOrder order;
  int64_t num_zero_bytes;  // From the sum on.
  DkvParts parts;
  QueryStatistic* statistics;
  LaunchOptions rest;
};
inline BackwardBuffers SplitWorkspace(const BackwardArgs& call, const Tiling& tiling,
                                      int num_panels, int num_parts, bool deterministic,
                                      const LaunchOptions& options) {
  const AttentionShape& shape = call.shape;
  char* next = static_cast<char*>(options.workspace);
  const auto take = [&](int64_t num_bytes) { return std::exchange(next, next + num_bytes); };
  BackwardBuffers buffers{call};
  const int64_t sum_bytes = DqSumBytes(shape, num_panels);
  buffers.sum = {reinterpret_cast<float*>(take(sum_bytes)), num_panels};
  DqOrder& order = buffers.order;
  order = DqOrderOf(shape, tiling, num_panels, deterministic);
  const int64_t done_bytes = DqDoneBytes(shape, order, num_panels);
  if (deterministic) {
    order.done = reinterpret_cast<int32_t*>(take(done_bytes));
    order.before = reinterpret_cast<int32_t*>(take(DqBeforeBytes(shape, order, tiling)));
  }
  buffers.num_zero_bytes = sum_bytes + done_bytes;
  buffers.parts = {reinterpret_cast<float*>(take(AlignStatistics(DkvPartsBytes(shape, num_parts)))),
                   num_parts};
  if (num_parts > 1) {
    BackwardArgs& args = buffers.args;
    args.dk = buffers.parts.data;
    args.dv = buffers.parts.data +
              num_parts * shape.batch * shape.k_len * shape.num_kv_heads * shape.head_dim;
    args.dkv_dtype = DType::kF32;
  }
  buffers.statistics = reinterpret_cast<QueryStatistic*>(take(StatisticsBytes(shape)));
  buffers.rest = options;
  buffers.rest.workspace = next;
  return buffers;
}

template <int kHeadDim, typename Element, bool kHasSoftcap>
Status LaunchBackward(const BackwardArgs& call, int num_parts, bool deterministic,
                      const LaunchOptions& options) {
  const AttentionShape& shape = call.shape;
  if (shape.batch == 0) return {};
  using Config = BackwardConfig<kHeadDim, Element, kHasSoftcap, BackwardPart::kAll>;
  const auto [args, sum, order, num_zero_bytes, parts, statistics, rest] = SplitWorkspace(
      call, kBackwardTiling<Config>, kHeadDim / 64, num_parts, deterministic, options);
  JAX_MAGI_CUDA_RETURN_IF_ERROR(PrepareBackward(args, kLog2E, sum, num_zero_bytes, statistics,
                                                static_cast<WorkCounter*>(rest.workspace),
                                                options.stream));
  if (shape.k_len > 0) {
    JAX_MAGI_RETURN_IF_BAD(
        LaunchBackwardPart<Config>(args, num_parts, statistics, sum.data, order, rest));
  }
  JAX_MAGI_CUDA_RETURN_IF_ERROR(FinishBackward(call, sum, parts, options.stream));
  return {};
}

template <int kHeadDim, typename Element>
Status BackwardVariant<kHeadDim, Element>::Launch(const BackwardArgs& args, int num_parts,
                                                  bool deterministic,
                                                  const LaunchOptions& options) {
  const auto launch = args.params.softcap == 0.0f ? LaunchBackward<kHeadDim, Element, false>
                                                  : LaunchBackward<kHeadDim, Element, true>;
  return launch(args, num_parts, deterministic, options);
}

template <int kHeadDim, typename Element>
Tiling BackwardVariant<kHeadDim, Element>::TilingOf(bool has_softcap) {
  return has_softcap
             ? kBackwardTiling<BackwardConfig<kHeadDim, Element, true, BackwardPart::kAll>>
             : kBackwardTiling<BackwardConfig<kHeadDim, Element, false, BackwardPart::kAll>>;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_LAUNCH_CUH_
