// The launchers of attention on a GPU, and what a call needs when it is traced.

#ifndef JAX_MAGI_CUDA_ATTENTION_ATTENTION_H_
#define JAX_MAGI_CUDA_ATTENTION_ATTENTION_H_

#include <string>
#include <vector>

#include "cc/attention.h"
#include "cc/cuda/attention/tile_list.h"
#include "cc/cuda/status.h"

namespace jax_magi::cuda {

// The launch parameters of a call, besides its operands.
struct LaunchOptions {
  // In device memory, made by PlanTiles or MakeTileList for the call's tiling.
  const TileList* tile_list;
  int64_t max_tiles;   // Capacity of the tile list.
  int64_t num_blocks;  // Approximate total over all tiles, from the stamp; 0: unknown.
  bool in_clusters;    // Whether the backward kernel runs in clusters.
  bool cuts_heads;     // Whether the backward kernel may cut tiles: see head_cuts.h.
  void* workspace;
  int64_t workspace_bytes;  // At least AttentionNeeds::workspace_bytes.
  int num_sms;              // Number of SMs of the device.
  int sm_margin;            // Number of these SMs to leave unused.
  cudaStream_t stream;
  Target target;  // The call's.
};

// Each launcher enqueues the computation, allocates nothing and waits for nothing. Element types
// are bf16 and fp16; head_dim and value_dim are multiples of 8, up to 256.
Status AttentionForward(const ForwardArgs& args, const LaunchOptions& options);
// The query heads of a group are split into `num_parts` parts: AttentionNeeds::num_dkv_parts.
Status AttentionBackward(const BackwardArgs& args, int num_parts, bool deterministic,
                         const LaunchOptions& options);

// The check of a call's list, if there is anything to process.
inline ListCheck CheckOf(const AttentionShape& shape, const Tiling& tiling,
                         const LaunchOptions& options, bool may_lack_empty = false) {
  const bool has_work = NumRows(shape, tiling) > 0;
  return {has_work ? options.tile_list : nullptr, KeyOf(shape, tiling),
          static_cast<int32_t>(options.max_tiles), may_lack_empty};
}

// Computes dq = softmax_scale * sum, where the sum is the args.dq_sum of earlier AttentionBackward
// calls. Of `args`, it uses the shape's batch and queries, the scale, dq_sum, dq, and dq's dtype,
// which is that of dk.
Status FinishDqSum(const BackwardArgs& args, cudaStream_t stream);

// How a call cuts the score matrix, and the workspace it needs; all zero if no variant supports it.
struct CallLayout {
  Tiling tiling{};
  int64_t workspace_bytes = 0;
  // The tiling of the list that is made for clusters instead, when the call is traced; zero if the
  // call never runs in clusters.
  Tiling cluster_tiling{};
  int64_t dq_sum_words = 0;  // See AttentionNeeds.
  bool cuts_heads = false;   // Whether the kernels support head_cuts.h.
};
CallLayout LayoutOf(const AttentionCall& call, int num_dkv_parts);

// All needs of a call, computed once when it is traced because that takes longer. If slices are
// given, they are one list that the whole batch shares, and the tile list is made from them.
AttentionNeeds NeedsOf(const AttentionCall& call, const Slice* slices);

// Why a call is too large for the kernels, which count in 32 bits; empty if it is not. The device
// makes no list with more blocks than this check assumes.
std::string TooLarge(const AttentionShape& shape, const Tiling& tiling, bool is_list_known);

// The variants of an architecture that were built, in readable form: "192/128 bfloat16" has head
// dim 192 and value dim 128.
std::vector<std::string> NamesOfVariants(Architecture architecture);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_ATTENTION_H_
