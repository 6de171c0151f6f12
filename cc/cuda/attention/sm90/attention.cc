#include "cc/cuda/attention/attention.h"

#include <algorithm>
#include <utility>

#include "cc/cuda/attention/dkv_parts.h"
#include "cc/cuda/attention/head_cuts.h"
#include "cc/cuda/attention/sm90/variants.h"
#include "cc/cuda/attention/tile_plan.h"
#include "cc/cuda/attention/workspace.h"
#include "cutlass/numeric_types.h"

namespace jax_magi::cuda {
namespace {

template <typename Element>
constexpr DType kDTypeOf = DType::kF32;
template <>
constexpr DType kDTypeOf<cutlass::bfloat16_t> = DType::kBF16;
template <>
constexpr DType kDTypeOf<cutlass::half_t> = DType::kF16;

// The variants that were built.
struct ForwardEntry {
  int64_t head_dim, value_dim;
  DType dtype;
  decltype(&ForwardVariant<64, 64, cutlass::half_t>::Launch) launch;
  decltype(&ForwardVariant<64, 64, cutlass::half_t>::TilingOf) tiling;
};
#define JAX_MAGI_VARIANT(head_dim, value_dim, Element)               \
  ForwardEntry{head_dim, value_dim, kDTypeOf<Element>,               \
               ForwardVariant<head_dim, value_dim, Element>::Launch, \
               ForwardVariant<head_dim, value_dim, Element>::TilingOf},
const ForwardEntry kForward[] = {JAX_MAGI_VARIANTS};
#undef JAX_MAGI_VARIANT

struct BackwardEntry {
  int64_t head_dim, value_dim;
  DType dtype;
  decltype(&BackwardVariant<64, 64, cutlass::half_t>::Launch) launch;
  decltype(&BackwardVariant<64, 64, cutlass::half_t>::TilingOf) tiling;
};
#define JAX_MAGI_VARIANT(head_dim, value_dim, Element)                 \
  BackwardEntry{head_dim, value_dim, kDTypeOf<Element>,                \
                BackwardVariant<head_dim, value_dim, Element>::Launch, \
                BackwardVariant<head_dim, value_dim, Element>::TilingOf},
const BackwardEntry kBackward[] = {JAX_MAGI_VARIANTS};
#undef JAX_MAGI_VARIANT

template <typename Entry, size_t kCount>
std::vector<std::string> NamesOf(const Entry (&entries)[kCount]) {
  std::vector<std::string> names;
  for (const Entry& entry : entries) {
    std::string dims = std::to_string(entry.head_dim);
    if (entry.value_dim != entry.head_dim) dims += "/" + std::to_string(entry.value_dim);
    names.push_back(dims + (entry.dtype == DType::kBF16 ? " bfloat16" : " float16"));
  }
  return names;
}

// The variants for scores with terms.
struct ForwardTermsEntry {
  int64_t head_dim, value_dim;
  DType dtype;
  decltype(&ForwardTermsVariant<64, 64, cutlass::half_t>::Launch) launch;
  decltype(&ForwardTermsVariant<64, 64, cutlass::half_t>::TilingOf) tiling;
};
#define JAX_MAGI_VARIANT(head_dim, value_dim, Element)                         \
  ForwardTermsEntry{head_dim, value_dim, kDTypeOf<Element>,                    \
                    ForwardTermsVariant<head_dim, value_dim, Element>::Launch, \
                    ForwardTermsVariant<head_dim, value_dim, Element>::TilingOf},
const ForwardTermsEntry kForwardTerms[] = {JAX_MAGI_VARIANTS};
#undef JAX_MAGI_VARIANT

struct BackwardTermsEntry {
  int64_t head_dim, value_dim;
  DType dtype;
  decltype(&BackwardTermsVariant<64, 64, cutlass::half_t>::Launch) launch;
  decltype(&BackwardTermsVariant<64, 64, cutlass::half_t>::TilingOf) tiling;
};
#define JAX_MAGI_VARIANT(head_dim, value_dim, Element)                           \
  BackwardTermsEntry{head_dim, value_dim, kDTypeOf<Element>,                     \
                     BackwardTermsVariant<head_dim, value_dim, Element>::Launch, \
                     BackwardTermsVariant<head_dim, value_dim, Element>::TilingOf},
const BackwardTermsEntry kBackwardTerms[] = {JAX_MAGI_VARIANTS};
#undef JAX_MAGI_VARIANT

template <typename Args>
bool HasTerms(const Args& args) {
  return args.bias != nullptr || args.alibi_slopes != nullptr;
}
bool HasTerms(const AttentionCall& call) { return call.has_bias || call.has_alibi; }

// Returns the smallest variant that holds the call's head dims, or null.
template <typename Entry, size_t kCount>
const Entry* Find(const Entry (&entries)[kCount], const AttentionShape& shape, DType dtype) {
  const Entry* found = nullptr;
  for (const Entry& entry : entries) {
    const bool fits = entry.dtype == dtype && shape.head_dim <= entry.head_dim &&
                      shape.value_dim <= entry.value_dim;
    if (fits && (found == nullptr ||
                 entry.head_dim + entry.value_dim < found->head_dim + found->value_dim)) {
      found = &entry;
    }
  }
  return found;
}

const char* const kNotBuilt =
    "no variant of the kernel was built for this element type and head dim";

}  // namespace

Status AttentionForward(const ForwardArgs& args, const LaunchOptions& options) {
  if (HasTerms(args)) {
    const ForwardTermsEntry* entry = Find(kForwardTerms, args.shape, args.dtype);
    return entry == nullptr ? Status{kNotBuilt, __FILE__, __LINE__} : entry->launch(args, options);
  }
  const ForwardEntry* entry = Find(kForward, args.shape, args.dtype);
  return entry == nullptr ? Status{kNotBuilt, __FILE__, __LINE__} : entry->launch(args, options);
}

Status AttentionBackward(const BackwardArgs& args, int num_parts, bool deterministic,
                         const LaunchOptions& options) {
  if (HasTerms(args)) {
    const BackwardTermsEntry* entry = Find(kBackwardTerms, args.shape, args.dtype);
    return entry == nullptr ? Status{kNotBuilt, __FILE__, __LINE__}
                            : entry->launch(args, num_parts, deterministic, options);
  }
  const BackwardEntry* entry = Find(kBackward, args.shape, args.dtype);
  return entry == nullptr ? Status{kNotBuilt, __FILE__, __LINE__}
                          : entry->launch(args, num_parts, deterministic, options);
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

namespace {

int64_t BackwardBytes(const AttentionCall& call, const Tiling& tiling, int64_t head_dim,
                      int num_parts) {
  return BackwardWorkspaceOf(call, tiling, static_cast<int>(head_dim), num_parts,
                             /*memory=*/nullptr)
      .num_bytes;
}

template <typename Entry>
CallLayout ForwardLayout(const Entry& entry, const AttentionShape& shape, const Tiling& tiling) {
  return {tiling, ForwardWorkspaceOf(shape, tiling, static_cast<int>(entry.head_dim),
                                     static_cast<int>(entry.value_dim), /*memory=*/nullptr)
                      .num_bytes};
}

CallLayout LayoutWithTerms(const AttentionCall& call, int num_dkv_parts) {
  const AttentionShape& shape = call.shape;
  if (!call.is_backward) {
    const ForwardTermsEntry* entry = Find(kForwardTerms, shape, call.dtype);
    if (entry == nullptr) return {};
    return ForwardLayout(*entry, shape, entry->tiling(shape));
  }
  const BackwardTermsEntry* entry = Find(kBackwardTerms, shape, call.dtype);
  if (entry == nullptr) return {};
  const Tiling tiling =
      entry->tiling(AreSlopesAlone(call.has_softcap, call.has_bias, call.wants_dslopes));
  return {tiling, BackwardBytes(call, tiling, entry->head_dim, num_dkv_parts)};
}

}  // namespace

CallLayout LayoutOf(const AttentionCall& call, int num_dkv_parts) {
  if (HasTerms(call)) return LayoutWithTerms(call, num_dkv_parts);
  const AttentionShape& shape = call.shape;
  if (!call.is_backward) {
    const ForwardEntry* entry = Find(kForward, shape, call.dtype);
    if (entry == nullptr) return {};
    return ForwardLayout(*entry, shape, entry->tiling(shape, call.has_softcap));
  }
  const BackwardEntry* entry = Find(kBackward, shape, call.dtype);
  if (entry == nullptr) return {};
  const Tiling tiling = entry->tiling(call.has_softcap, /*in_clusters=*/false);
  CallLayout layout{tiling, BackwardBytes(call, tiling, entry->head_dim, num_dkv_parts)};
  layout.dq_sum_words = DqSumWords(shape, static_cast<int>(entry->head_dim));
  if (!call.deterministic) {
    const Tiling cluster_tiling = entry->tiling(call.has_softcap, /*in_clusters=*/true);
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

std::vector<std::string> ForwardVariants() { return NamesOf(kForward); }
std::vector<std::string> BackwardVariants() { return NamesOf(kBackward); }

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
    if (!CutsHeads(call, /*is_mask_known=*/slices != nullptr)) {
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
