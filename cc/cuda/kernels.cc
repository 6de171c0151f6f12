#include "cc/cuda/kernels.h"

#include <algorithm>

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
const ForwardEntry kForward[] = {JAX_MAGI_FORWARD_VARIANTS};
#undef JAX_MAGI_VARIANT

struct BackwardEntry {
  int64_t head_dim, value_dim;
  DType dtype;
  decltype(&BackwardVariant<64, cutlass::half_t>::Launch) launch;
  decltype(&BackwardVariant<64, cutlass::half_t>::TilingOf) tiling;
};
#define JAX_MAGI_VARIANT(dim, Element)                                              \
  BackwardEntry{dim, dim, kDTypeOf<Element>, BackwardVariant<dim, Element>::Launch, \
                BackwardVariant<dim, Element>::TilingOf},
const BackwardEntry kBackward[] = {JAX_MAGI_BACKWARD_VARIANTS};
#undef JAX_MAGI_VARIANT

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
  const ForwardEntry* entry = Find(kForward, args.shape, args.dtype);
  return entry == nullptr ? kNotBuilt : entry->launch(args, options);
}

Status AttentionBackward(const BackwardArgs& args, int num_splits, bool deterministic,
                         const LaunchOptions& options) {
  const BackwardEntry* entry = Find(kBackward, args.shape, args.dtype);
  return entry == nullptr ? kNotBuilt : entry->launch(args, num_splits, deterministic, options);
}

Tiling ForwardTiling(const AttentionShape& shape, DType dtype, bool has_softcap) {
  const ForwardEntry* entry = Find(kForward, shape, dtype);
  return entry == nullptr ? Tiling{} : entry->tiling(shape, has_softcap);
}

Tiling BackwardTiling(const AttentionShape& shape, DType dtype, bool has_softcap) {
  const BackwardEntry* entry = Find(kBackward, shape, dtype);
  return entry == nullptr ? Tiling{} : entry->tiling(has_softcap, /*by_keys=*/true);
}

int64_t ForwardWorkspace(const AttentionShape& shape, DType dtype, bool has_softcap,
                         bool has_plan) {
  const ForwardEntry* entry = Find(kForward, shape, dtype);
  if (entry == nullptr) return 0;
  return ScheduleBytes(shape, entry->tiling(shape, has_softcap), has_plan);
}

int64_t BackwardWorkspace(const AttentionShape& shape, DType dtype, bool has_softcap, bool has_plan,
                          bool deterministic) {
  const BackwardEntry* entry = Find(kBackward, shape, dtype);
  if (entry == nullptr) return 0;
  int64_t num_bytes = ScheduleBytes(shape, entry->tiling(has_softcap, /*by_keys=*/true), has_plan);
  if (deterministic) {
    num_bytes += ScheduleBytes(shape, entry->tiling(has_softcap, /*by_keys=*/false), has_plan);
  }
  return num_bytes;
}

int BackwardSplits(const AttentionShape& shape, DType dtype, bool has_softcap) {
  const Tiling tiling = BackwardTiling(shape, dtype, has_softcap);
  if (tiling.num_rows == 0 || shape.num_kv_heads == 0) return 1;
  // Four times as much work as the GPU has multiprocessors: under a causal mask it is uneven.
  constexpr int64_t kEnough = 500;
  const int64_t num_tiles =
      shape.batch * shape.num_kv_heads * CeilDiv(NumRows(shape, tiling), tiling.num_rows);
  int num_splits = 1;
  for (int i = 2; i <= shape.group() && num_tiles * num_splits < kEnough; ++i) {
    if (shape.group() % i == 0) num_splits = i;
  }
  return num_splits;
}

}  // namespace jax_magi::cuda
