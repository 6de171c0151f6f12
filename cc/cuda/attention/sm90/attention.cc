#include "cc/cuda/attention/attention.h"

#include <utility>

#include "cc/cuda/attention/backward_finish.h"
#include "cc/cuda/attention/backward_prepare.h"
#include "cc/cuda/attention/dkv_parts.h"
#include "cc/cuda/attention/dq_order.h"
#include "cc/cuda/attention/head_cuts.h"
#include "cc/cuda/attention/key_parts.h"
#include "cc/cuda/attention/sm90/variants.h"
#include "cc/cuda/attention/term_gradients.h"
#include "cc/cuda/attention/tile_plan.h"
#include "cutlass/numeric_types.h"

namespace jax_magi::cuda {
namespace {

template <typename Element>
constexpr DType kDTypeOf = DType::kF32;
template <>
constexpr DType kDTypeOf<cutlass::bfloat16_t> = DType::kBF16;
template <>
constexpr DType kDTypeOf<cutlass::half_t> = DType::kF16;

// What was built.
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

// For scores with terms.
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

// The smallest that holds the call's head dims.
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

const Status kNotBuilt = {"no variant of the kernel was built for this element type and head dim",
                          __FILE__, __LINE__};

}  // namespace

Status AttentionForward(const ForwardArgs& args, const LaunchOptions& options) {
  if (HasTerms(args)) {
    const ForwardTermsEntry* entry = Find(kForwardTerms, args.shape, args.dtype);
    return entry == nullptr ? kNotBuilt : entry->launch(args, options);
  }
  const ForwardEntry* entry = Find(kForward, args.shape, args.dtype);
  return entry == nullptr ? kNotBuilt : entry->launch(args, options);
}

int NumPartsIn(const AttentionShape& shape, int64_t num_bytes) {
  for (int parts = 2; shape.num_kv_heads > 0 && parts <= shape.group(); ++parts) {
    if (shape.group() % parts == 0 && num_bytes > 0 &&
        AlignStatistics(DkvPartsBytes(shape, parts)) == num_bytes)
      return parts;
  }
  return 1;
}

Status AttentionBackward(const BackwardArgs& args, int num_parts, bool deterministic,
                         const LaunchOptions& options) {
  if (HasTerms(args)) {
    const BackwardTermsEntry* entry = Find(kBackwardTerms, args.shape, args.dtype);
    return entry == nullptr ? kNotBuilt : entry->launch(args, num_parts, deterministic, options);
  }
  const BackwardEntry* entry = Find(kBackward, args.shape, args.dtype);
  return entry == nullptr ? kNotBuilt : entry->launch(args, num_parts, deterministic, options);
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

// As SplitWorkspace splits them, with one part of dk and dv.
int64_t BackwardBytes(const AttentionCall& call, const Tiling& tiling, int64_t head_dim) {
  const AttentionShape& shape = call.shape;
  const int num_dims = static_cast<int>(head_dim);
  const DqOrder order = DqOrderOf(shape, tiling, num_dims, call.deterministic);
  const int64_t sum_bytes = call.sums_dq ? 0 : DqSumBytes(shape, num_dims);
  return sum_bytes + DqDoneBytes(order) + DqTurnsBytes(shape, order, tiling) +
         StatisticsBytes(shape) + static_cast<int64_t>(sizeof(WorkCounter));
}

template <typename Entry>
CallLayout ForwardLayout(const Entry& entry, const AttentionShape& shape, const Tiling& tiling) {
  const int64_t parts = KeyPartsBytes(shape, tiling, static_cast<int>(entry.head_dim),
                                      static_cast<int>(entry.value_dim));
  return {tiling, static_cast<int64_t>(sizeof(WorkCounter)) + parts};
}

CallLayout LayoutWithTerms(const AttentionCall& call) {
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
  return {tiling, BackwardBytes(call, tiling, entry->head_dim) + TermGradientsBytes(call)};
}

}  // namespace

CallLayout LayoutOf(const AttentionCall& call) {
  if (HasTerms(call)) return LayoutWithTerms(call);
  const AttentionShape& shape = call.shape;
  if (!call.is_backward) {
    const ForwardEntry* entry = Find(kForward, shape, call.dtype);
    if (entry == nullptr) return {};
    return ForwardLayout(*entry, shape, entry->tiling(shape, call.has_softcap));
  }
  const BackwardEntry* entry = Find(kBackward, shape, call.dtype);
  if (entry == nullptr) return {};
  const Tiling tiling = entry->tiling(call.has_softcap, /*in_clusters=*/false);
  CallLayout layout{tiling, BackwardBytes(call, tiling, entry->head_dim)};
  layout.dq_sum_words = DqSumWords(shape, static_cast<int>(entry->head_dim));
  if (!call.deterministic) {
    const Tiling cluster_tiling = entry->tiling(call.has_softcap, /*in_clusters=*/true);
    if (cluster_tiling.num_rows > tiling.num_rows) layout.cluster_tiling = cluster_tiling;
  }
  return layout;
}

std::vector<std::string> ForwardVariants() { return NamesOf(kForward); }
std::vector<std::string> BackwardVariants() { return NamesOf(kBackward); }

AttentionNeeds NeedsOf(const AttentionCall& call, const Slice* slices) {
  const CallLayout layout = LayoutOf(call);
  AttentionNeeds needs;
  if (layout.tiling.num_rows == 0) return needs;  // The call will say that it was not built.
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
      needs.num_dkv_parts = NumDkvParts(call.shape, layout.tiling, needs.tile_list, cluster_size);
    }
    needs.workspace_bytes += AlignStatistics(DkvPartsBytes(call.shape, needs.num_dkv_parts));
    needs.is_dbias_summed =
        call.wants_dbias && IsDbiasSummed(call.shape, call.bias_layout, call.dtype);
  }
  return needs;
}

}  // namespace jax_magi::cuda
