// The parameters and the shared memory of the forward kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_TILE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_TILE_CUH_

#include <type_traits>

#include "cc/cuda/attention/join_parts.cuh"
#include "cc/cuda/attention/score_terms.cuh"
#include "cc/cuda/attention/sm80/forward_config.h"
#include "cc/cuda/attention/sm80/forward_walk.cuh"
#include "cc/cuda/attention/tile_info.h"

namespace jax_magi::cuda::sm80 {

struct ForwardParams {
  const void *q, *k, *v;
  WorkParams work;
  int q_len, k_len, num_q_heads, num_kv_heads, group, head_dim, value_dim;
  float softmax_scale, softcap;
  const float* sink;
  void* out;
  float *lse, *max_logits;
  PartsParams parts;
  // See ForwardArgs, and whether this call rounds to `out`.
  const float* running_out;  // The results to merge with, or null.
  bool is_rounded;
  bool keeps_rows;  // Each row sees keys in one call only; the others leave it unchanged.
};

// The parameters of a call with terms.
struct ForwardTermsParams : ForwardParams {
  ScoreTerms terms;
  bool is_out_float;
};
template <typename Config>
using ForwardParamsOf = std::conditional_t<Config::kHasTerms, ForwardTermsParams, ForwardParams>;

// What the two warps of each pair exchange.
template <typename Config, bool kHasPairs = Config::kHasPairs>
struct PairsShared {
  alignas(128) typename Config::Element p[Config::kBlockM * Config::kBlockN];
  float max[Config::kNumWarps][32];    // Of a row.
  float4 sums[Config::kNumWarps][32];  // Of a thread's two rows: the sums, and the maxima.
};
template <typename Config>
struct PairsShared<Config, false> {};

template <typename Config>
struct ForwardShared {
  using Element = typename Config::Element;
  alignas(128) Element queries[Config::kBlockM * Config::kHeadDim];
  alignas(128) char stages[Config::kStages][Config::kStageBytes];
  KeyWalk<Config::kBlockN, Config::kHasTerms> walk;
  WorkItem item;
  KeyParts</*kClusterSize=*/1> parts;
  TileInfo tile;
  // Row 0 of the tile's batch element and heads.
  const Element *q, *k, *v;
  float slope;  // With terms: that of the tile's head, or 0.
  PairsShared<Config> pairs;
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_TILE_CUH_
