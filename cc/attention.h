// What one attention call is made of, whichever device computes it.
//
// Layouts (row-major):
//   q, dout, dq          [batch, q_len, num_q_heads, head_dim or value_dim]
//   k, v, dk, dv         [batch, k_len, num_kv_heads, head_dim or value_dim]
//   slices               [batch or 1, num_slices, 6]
//   sink, max_logits     [batch, num_q_heads]
//   lse (forward)        [batch, q_len, num_q_heads]
//   lse, delta (backward)[batch, num_q_heads, q_len]

#ifndef JAX_MAGI_ATTENTION_H_
#define JAX_MAGI_ATTENTION_H_

#include <cstdint>

#include "cc/dtype.h"
#include "cc/mask.h"

namespace jax_magi {

struct AttentionShape {
  int64_t batch, q_len, k_len, num_q_heads, num_kv_heads, head_dim, value_dim;
  int64_t num_slices;
  bool shared_slices;  // One slice list for the whole batch.

  JAX_MAGI_INLINE int64_t group() const { return num_q_heads / num_kv_heads; }
};

struct AttentionParams {
  float softmax_scale;
  float softcap;  // 0: none.
};

struct ForwardArgs {
  AttentionShape shape;
  AttentionParams params;
  DType dtype;
  const void *q, *k, *v;
  const Slice* slices;
  const float* sink;  // -inf: none.
  void* out;
  float *lse, *max_logits;
};

struct BackwardArgs {
  AttentionShape shape;
  AttentionParams params;
  DType dtype;
  DType dkv_dtype;  // dtype, or float32 for callers that go on summing.
  const void *q, *k, *v, *dout;
  const float *lse, *delta;
  const Slice* slices;
  void* dq;  // float32 where it is summed in memory, else dtype.
  void *dk, *dv;
};

}  // namespace jax_magi

#endif  // JAX_MAGI_ATTENTION_H_
