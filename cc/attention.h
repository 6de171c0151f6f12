// What one attention call is made of, whichever device computes it.
//
// With S = softmax_scale * q k^T over visible pairs (capped, where there is a cap), the forward
// pass computes
//
//   lse = log(sum of exp(S) + exp(sink)),   out = exp(S - lse) v,   max_logits = max of S, uncapped
//
// and the backward pass, with P = exp(S - lse), dP = dout v^T and dS = P (dP - delta),
//
//   dq = softmax_scale * dS k,   dk = softmax_scale * dS^T q,   dv = P^T dout.
//
// lse and delta are natural, float32, and the same for every device: lse as the forward pass
// returns it, delta = rowsum(dout * out) - dlse. They may be those of more keys than the call has.
//
// Layouts (row-major):
//   q, dout, dq, out     [batch, q_len, num_q_heads, head_dim or value_dim]
//   k, v, dk, dv         [batch, k_len, num_kv_heads, head_dim or value_dim]
//   slices               [batch or 1, num_slices, 6]
//   sink, max_logits     [batch, num_q_heads]
//   lse, delta           [batch, q_len, num_q_heads]

#ifndef JAX_MAGI_ATTENTION_H_
#define JAX_MAGI_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "cc/dtype.h"
#include "cc/mask.h"

namespace jax_magi {

struct AttentionShape {
  int64_t batch, q_len, k_len, num_q_heads, num_kv_heads, head_dim, value_dim;
  int64_t num_slices;
  bool shared_slices;  // One slice list for the whole batch.

  // Query heads of a kv head.
  JAX_MAGI_INLINE int64_t group() const { return num_q_heads / num_kv_heads; }
  JAX_MAGI_INLINE int64_t num_statistics() const { return batch * q_len * num_q_heads; }
};

struct AttentionParams {
  float softmax_scale;
  float softcap;  // 0: none.
};

struct ForwardArgs {
  AttentionShape shape;
  AttentionParams params;
  DType dtype;      // Of q, k and v.
  DType out_dtype;  // The same, or float32 for callers that go on merging.
  const void *q, *k, *v;
  const Slice* slices;
  const float* sink;  // -inf: none.
  void* out;
  float* lse;         // -inf for rows that see nothing.
  float* max_logits;  // -inf for heads that see nothing.
};

struct BackwardArgs {
  AttentionShape shape;
  AttentionParams params;
  DType dtype;                // Of q, k, v and dout.
  DType dq_dtype, dkv_dtype;  // The same, or float32 for callers that go on summing.
  const void *q, *k, *v, *dout;
  const float *lse, *delta;
  const Slice* slices;
  // Where AttentionNeeds says that dq is summed, it is float32, and comes without softmax_scale.
  void *dq, *dk, *dv;
};

// A call as it is traced, when there is no data yet.
struct AttentionCall {
  AttentionShape shape;
  DType dtype;
  bool has_softcap, is_backward, deterministic;
};

// What a device asks of the caller for it.
struct AttentionNeeds {
  int64_t workspace_bytes = 0;
  // A group's query heads are worked on in so many parts, whose dk and dv are added at the end.
  int num_dkv_parts = 1;
  // dq is a sum in memory: float32, and without softmax_scale.
  bool is_dq_summed = false;
  // What kernels derive from a mask that is known; none where they do it in each call.
  std::vector<int32_t> tile_list;
  // An estimate of the time that the list takes, to choose between lists of the same pairs.
  int64_t tile_cost = 0;
  // By what the list was made. A handler refuses a list with another stamp than its own.
  int32_t tile_stamp = 0;
};

}  // namespace jax_magi

#endif  // JAX_MAGI_ATTENTION_H_
