#include "cc/cuda/attention/attention.h"

#include <algorithm>
#include <utility>

#include "cc/cuda/attention/dkv_parts.h"
#include "cc/cuda/attention/head_cuts.h"
#include "cc/cuda/attention/tile_plan.h"
#include "cc/cuda/attention/variant.h"
#include "cc/cuda/attention/workspace.h"

namespace jax_magi::cuda {
namespace {

const std::vector<Variant>& VariantsOf(Architecture architecture) {
  static const std::vector<Variant> none;
  switch (architecture) {
    case Architecture::kSm90:
      return Sm90Variants();
    case Architecture::kSm80:
      return Sm80Variants();
    case Architecture::kNone:
      break;
  }
  return none;
}

// Returns the smallest variant that holds the call's head dims, or null.
const Variant* Find(const AttentionShape& shape, DType dtype, const Target& target) {
  const Variant* found = nullptr;
  for (const Variant& variant : VariantsOf(target.architecture)) {
    const bool fits = variant.dtype == dtype && shape.head_dim <= variant.head_dim &&
                      shape.value_dim <= variant.value_dim;
    if (fits && (found == nullptr ||
                 variant.head_dim + variant.value_dim < found->head_dim + found->value_dim)) {
      found = &variant;
    }
  }
  return found;
}

// The kernels of a call are those with terms if its scores have any.
bool HasTerms(const AttentionCall& call) { return call.has_bias || call.has_alibi; }
const ForwardKernels& ForwardOf(const Variant& variant, const AttentionCall& call) {
  return HasTerms(call) ? variant.forward_terms : variant.forward;
}
const BackwardKernels& BackwardOf(const Variant& variant, const AttentionCall& call) {
  return HasTerms(call) ? variant.backward_terms : variant.backward;
}

const char* const kNotBuilt =
    "no variant of the kernel was built for this element type and head dim";

}  // namespace

Status AttentionForward(const ForwardArgs& args, const LaunchOptions& options) {
  const Variant* variant = Find(args.shape, args.dtype, options.target);
  if (variant == nullptr) return {kNotBuilt, __FILE__, __LINE__};
  return ForwardOf(*variant, CallOf(args, options.target)).launch(args, options);
}

Status AttentionBackward(const BackwardArgs& args, int num_parts, bool deterministic,
                         const LaunchOptions& options) {
  const Variant* variant = Find(args.shape, args.dtype, options.target);
  if (variant == nullptr) return {kNotBuilt, __FILE__, __LINE__};
  return BackwardOf(*variant, CallOf(args, deterministic, options.target))
      .launch(args, num_parts, deterministic, options);
}

Status FinishDqSum(const BackwardArgs& args, cudaStream_t stream) {
  const int64_t words_per_dim = DqSumWords(args.shape, /*num_dims=*/1);
  if (words_per_dim == 0) return {};
  const int64_t num_dims = args.dq_sum_words / words_per_dim;
  if (num_dims * words_per_dim != args.dq_sum_words || num_dims < args.shape.head_dim ||
      num_dims % 64 != 0) {
    return {"the sum of dq has another size than the backward kernel's", __FILE__, __LINE__};
  }
  const DqSum sum{args.dq_sum, static_cast<int>(num_dims)};
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      FinishBackward(args, sum, /*parts=*/{nullptr, /*num_parts=*/1}, stream));
  return {};
}

CallLayout LayoutOf(const AttentionCall& call, int num_dkv_parts) {
  const AttentionShape& shape = call.shape;
  const Variant* variant = Find(shape, call.dtype, call.target);
  if (variant == nullptr) return {};
  if (!call.is_backward) {
    const Tiling tiling = ForwardOf(*variant, call).tiling(call);
    return {tiling, ForwardWorkspaceOf(shape, tiling, variant->head_dim, variant->value_dim,
                                       /*memory=*/nullptr)
                        .num_bytes};
  }
  const BackwardKernels& kernels = BackwardOf(*variant, call);
  const Tiling tiling = kernels.tiling(call);
  CallLayout layout{tiling, BackwardWorkspaceOf(call, tiling, variant->head_dim, num_dkv_parts,
                                                /*memory=*/nullptr)
                                .num_bytes};
  layout.cuts_heads = kernels.cuts_heads;
  layout.dq_sum_words = DqSumWords(shape, variant->head_dim);
  if (!call.deterministic && kernels.cluster_tiling != nullptr) {
    const Tiling cluster_tiling = kernels.cluster_tiling(call);
    if (cluster_tiling.num_rows > tiling.num_rows) layout.cluster_tiling = cluster_tiling;
  }
  return layout;
}

std::string TooLarge(const AttentionShape& shape, const Tiling& tiling, bool is_list_known) {
  constexpr int64_t kMost = int64_t{1} << 31;
  // MakeDqOrder uses one warp per unit and slice list.
  constexpr int64_t kMostWarps = kMost / 32;
  const int64_t num_tiles = MaxTiles(shape, tiling), num_lists = NumLists(shape);
  const int64_t num_repeats = shape.shared_slices ? std::max<int64_t>(shape.batch, 1) : 1;
  const int64_t num_heads = std::max<int64_t>(shape.num_q_heads, 1);
  if (num_tiles >= kMost || num_tiles * num_repeats >= kMost ||
      num_tiles * num_repeats * num_heads >= kMost) {
    return "tiles of all batch rows and heads must be fewer than 2**31";
  }
  if (shape.batch * std::max(shape.q_len, shape.k_len) >= kMost / 2 ||
      NumStatistics(shape) >= kMost || num_lists * (DqSumRows(shape.q_len) / 8) >= kMostWarps) {
    return "batch, heads and lengths must have a smaller product";
  }
  const int64_t num_blocks = CeilDiv(NumColumns(shape, tiling), tiling.num_columns);
  const int64_t group = shape.num_kv_heads > 0 ? std::max<int64_t>(shape.group(), 1) : 1;
  if (!is_list_known && shape.num_slices * num_blocks * group >= kMost) {
    return "slices that are not known when the call is traced must be fewer, by these lengths";
  }
  return "";
}

std::vector<std::string> NamesOfVariants(Architecture architecture) {
  std::vector<std::string> names;
  for (const Variant& variant : VariantsOf(architecture)) {
    std::string dims = std::to_string(variant.head_dim);
    if (variant.value_dim != variant.head_dim) dims += "/" + std::to_string(variant.value_dim);
    names.push_back(dims + (variant.dtype == DType::kBF16 ? " bfloat16" : " float16"));
  }
  return names;
}

AttentionNeeds NeedsOf(const AttentionCall& call, const Slice* slices) {
  const CallLayout layout = LayoutOf(call, /*num_dkv_parts=*/1);
  AttentionNeeds needs;
  if (layout.tiling.num_rows == 0) return needs;  // The call will report that no variant was built.
  needs.workspace_bytes = layout.workspace_bytes;
  needs.tile_stamp = layout.tiling.stamp();
  needs.tile_list_words = TileListBytes(call.shape, layout.tiling) / sizeof(int32_t);
  int cluster_size = 1;
  if (slices != nullptr) {
    TilePlan plan = PlanTiles(call.shape, layout.tiling, slices);
    if (layout.cluster_tiling.num_rows > 0 && MayBeBetterInClusters(plan.tile_list)) {
      TilePlan other = PlanTiles(call.shape, layout.cluster_tiling, slices);
      if (IsBetterInClusters(layout.tiling, plan.tile_list, other.tile_list)) {
        plan = std::move(other);
        needs.tile_stamp = layout.cluster_tiling.stamp();
        cluster_size = layout.cluster_tiling.num_rows / layout.tiling.num_rows;
      }
    }
    needs.tile_list = std::move(plan.tile_list);
    needs.tile_cost = plan.cost;
    needs.tile_stamp += StampOfBlocks(NumBlocks(needs.tile_list));
  }
  if (call.is_backward) {
    needs.dq_sum_words = layout.dq_sum_words;
    if (!layout.cuts_heads || !CutsHeads(call, /*is_mask_known=*/slices != nullptr)) {
      needs.num_dkv_parts =
          NumDkvParts(call.shape, layout.tiling, needs.tile_list, cluster_size, call.num_sms);
    }
    needs.workspace_bytes = LayoutOf(call, needs.num_dkv_parts).workspace_bytes;
    needs.is_dbias_summed =
        call.wants_dbias && IsDbiasSummed(call.shape, call.bias_layout, call.dtype);
  }
  return needs;
}

}  // namespace jax_magi::cuda
