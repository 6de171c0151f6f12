// Attention on a GPU: the launchers. sm90/ has those of Hopper.

#ifndef JAX_MAGI_CUDA_ATTENTION_ATTENTION_H_
#define JAX_MAGI_CUDA_ATTENTION_ATTENTION_H_

#include <string>
#include <vector>

#include "cc/attention.h"
#include "cc/cuda/attention/tile_list.h"
#include "cc/cuda/status.h"

namespace jax_magi::cuda {

// How a call is launched, besides its operands.
struct LaunchOptions {
  // On the device, as PlanTiles or MakeTileList made it for the call's tiling.
  const TileList* tile_list;
  int64_t max_tiles;   // That there is room for where it lies.
  int64_t num_blocks;  // Of all its tiles, about, as its stamp says; 0: not known.
  bool in_clusters;    // Of the backward kernel.
  bool cuts_heads;     // The backward kernel may cut tiles: see head_cuts.h.
  void* workspace;
  int64_t workspace_bytes;  // As many as AttentionNeeds says, or more.
  int num_sms;              // Of the device.
  int sm_margin;            // Of these, not to be used.
  cudaStream_t stream;
};

// Each enqueues the computation; allocates nothing and waits for nothing. Element types are bf16
// and fp16; head_dim and value_dim are multiples of 8, up to 256.
Status AttentionForward(const ForwardArgs& args, const LaunchOptions& options);
// A group's query heads are worked on in `num_parts` parts: AttentionNeeds::num_dkv_parts.
Status AttentionBackward(const BackwardArgs& args, int num_parts, bool deterministic,
                         const LaunchOptions& options);

// dq = softmax_scale * sum, which AttentionBackward was called with as args.dq_sum. Of `args`, it
// takes the shape's batch and queries, the scale, dq and its dtype, which is that of dk, and
// dq_sum.
Status FinishDqSum(const BackwardArgs& args, cudaStream_t stream);

// How a call cuts the score matrix, and the workspace it takes; all zero where no variant takes it.
struct CallLayout {
  Tiling tiling{};
  int64_t workspace_bytes = 0;
  // Of the list that clusters take instead, if it was made for them when the call was traced; zero
  // where the call never runs in any.
  Tiling cluster_tiling{};
  int64_t dq_sum_words = 0;  // As AttentionNeeds says.
};
CallLayout LayoutOf(const AttentionCall& call, int num_dkv_parts);

// All that a call needs, when it is traced: it takes longer to say. With slices, one list that the
// whole batch shares, there will be a list of tiles.
AttentionNeeds NeedsOf(const AttentionCall& call, const Slice* slices);

// Why a call is too large for the kernels, which count in 32 bits; empty: it is not. A list that
// the device makes has no more blocks than this allows for.
std::string TooLarge(const AttentionShape& shape, const Tiling& tiling, bool is_list_known);

// What was built, for people: "192/128 bfloat16" has head dim 192 and value dim 128.
std::vector<std::string> ForwardVariants();
std::vector<std::string> BackwardVariants();

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_ATTENTION_H_
