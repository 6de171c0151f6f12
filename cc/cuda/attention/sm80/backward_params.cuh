// The parameters of the backward kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_PARAMS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_PARAMS_CUH_

#include <type_traits>

#include "cc/cuda/attention/dq_order.h"
#include "cc/cuda/attention/score_terms.cuh"
#include "cc/cuda/attention/sm80/block_walk.cuh"
#include "cc/cuda/attention/term_gradients.h"

namespace jax_magi::cuda::sm80 {

struct BackwardParams {
  const void *q, *k, *v, *dout;
  float* dq_sum;  // See DqSum.
  int dq_sum_rows;
  DqOrder dq_order;  // The order of additions to it.
  WorkParams work;
  WalkParams walk;
  int batch, q_len, k_len, num_q_heads, num_kv_heads;
  int head_dim, value_dim;
  float softmax_scale;
  SoftmaxScale scale;  // With terms, for scores in natural units.
  const QueryStatistic* statistics;
  int padded_queries;  // Per head.
  // dK and dV: [packs_per_kv_head, batch, k_len, num_kv_heads, dim].
  void *dk, *dv;
  bool is_float;  // Whether dK and dV are float32; otherwise they have the dtype of the operands.
};

// The parameters of a call with terms.
struct BackwardTermsParams : BackwardParams {
  ScoreTerms terms;
  TermGradients gradients;
};
template <typename Config>
using BackwardParamsOf = std::conditional_t<Config::kHasTerms, BackwardTermsParams, BackwardParams>;

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_PARAMS_CUH_
