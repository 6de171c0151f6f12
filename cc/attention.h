// What one attention call is made of, whichever device computes it.
//
// The logits of visible pairs (i, j) of a query and a key, positions in q and k, are
//
//   S = softmax_scale * q k^T + bias + slope * (j - i)
//
// and then capped, where there is a cap. The forward pass computes
//
//   lse = log(sum of exp(S) + exp(sink)),   out = exp(S - lse) v,   max_logits = max of S, uncapped
//
// and the backward pass, with P = exp(S - lse), dP = dout v^T and dS = P (dP - delta), times the
// slope of the cap,
//
//   dq = softmax_scale * dS k,   dk = softmax_scale * dS^T q,   dv = P^T dout,
//   dbias = dS, summed over whatever shares an element,   dslopes = sum of dS * (j - i).
//
// A bias of -inf hides its pair. Any other that is not finite reaches the results.
//
// lse and delta are natural, float32, and the same for every device: lse as the forward pass
// returns it, delta = rowsum(dout * out) - dlse. They may be those of more keys than the call has.
//
// Calls over other keys of the same queries ("stages") may follow each other, and share results: a
// forward call then merges its results into those of the calls before it, by lse, and a backward
// call adds its dq to theirs.
//
// Layouts (row-major):
//   q, dout, dq, out     [batch, q_len, num_q_heads, head_dim or value_dim]
//   k, v, dk, dv         [batch, k_len, num_kv_heads, head_dim or value_dim]
//   slices               [batch or 1, num_slices, 6]
//   sink, max_logits     [batch, num_q_heads]
//   bias, dbias          [batch or 1, num_q_heads or 1, q_len or 1, k_len]
//   alibi_slopes         [batch, num_q_heads], and so dslopes
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

// Where an element of the bias lies: batch * batch_stride + head * head_stride + query * q_stride +
// key. A stride is 0 where one element serves several batch rows, heads or queries, and only there.
struct BiasLayout {
  DType dtype;  // That of q, or float32.
  int64_t batch_stride, head_stride, q_stride;
};

// That of a bias with `batch`, `heads` and `rows`, each of them 1 or as many as the call has.
inline BiasLayout BiasLayoutOf(const AttentionShape& shape, DType dtype, int64_t batch,
                               int64_t heads, int64_t rows) {
  const auto stride = [](int64_t size, int64_t full, int64_t elements) {
    return size == 1 && full != 1 ? 0 : elements;
  };
  return {dtype, stride(batch, shape.batch, heads * rows * shape.k_len),
          stride(heads, shape.num_q_heads, rows * shape.k_len),
          stride(rows, shape.q_len, shape.k_len)};
}

struct ForwardArgs {
  AttentionShape shape;
  AttentionParams params;
  DType dtype;      // Of q, k and v.
  DType out_dtype;  // The same, or float32 for callers that go on merging.
  const void *q, *k, *v;
  const Slice* slices;
  const float* sink;  // -inf: none.
  const void* bias;   // Null: none.
  BiasLayout bias_layout;
  const float* alibi_slopes;  // Null: none.
  void* out;
  float* lse;         // -inf for rows that see nothing.
  float* max_logits;  // -inf for heads that see nothing.
  // The output of earlier calls over other keys, or null. Its lse and max_logits are in the arrays
  // above. If it is float32, this call merges its results with them. It then equals `out` if `out`
  // is float32, and fully masked rows stay unchanged; otherwise this is the last call, which rounds
  // to `out`. Only the first call uses the sink. If it is of `dtype`, it equals `out`, and each
  // row sees keys in one of the calls only: the others leave it unchanged.
  const void* running_out;
  DType running_dtype;
};

struct BackwardArgs {
  AttentionShape shape;
  AttentionParams params;
  DType dtype;                // Of q, k, v and dout.
  DType dq_dtype, dkv_dtype;  // The same, or float32 for callers that go on summing.
  const void *q, *k, *v, *dout;
  const float *lse, *delta;
  const Slice* slices;
  const void* bias;  // Null: none.
  BiasLayout bias_layout;
  const float* alibi_slopes;  // Null: none.
  // Where AttentionNeeds says that dq is summed, it is float32, and comes without softmax_scale.
  void *dq, *dk, *dv;
  // A sum of dq over several calls, which this one adds to instead of writing dq: float32, without
  // softmax_scale, [batch, num_q_heads, dq_sum_words], each head in an order of the device's own.
  // Null: none.
  float* dq_sum;
  int64_t dq_sum_words;
  // As long as the bias, and 0 where it met no visible pair. Null: not wanted.
  void* dbias;
  DType dbias_dtype;  // That of the bias, or float32 where AttentionNeeds says that it is summed.
  float* dslopes;     // Null: not wanted.
};

// A call as it is traced, when there is no data yet.
struct AttentionCall {
  AttentionShape shape;
  DType dtype;
  bool has_softcap, is_backward, deterministic;
  bool has_bias = false, has_alibi = false;
  BiasLayout bias_layout{};  // Where there is a bias.
  bool wants_dbias = false, wants_dslopes = false;
  bool sums_dq = false;          // Over several calls.
  bool has_float_grads = false;  // Those of k and v are float32; else they are of dtype.
  int num_sms = 0;               // Of the GPU it is traced for; 0: not known.
};

// The call that these are the operands of.
template <typename Args>
AttentionCall CallWithTerms(const Args& args, bool is_backward, bool deterministic) {
  AttentionCall call{args.shape, args.dtype, args.params.softcap != 0.0f, is_backward,
                     deterministic};
  call.has_bias = args.bias != nullptr;
  call.has_alibi = args.alibi_slopes != nullptr;
  call.bias_layout = args.bias_layout;
  return call;
}
inline AttentionCall CallOf(const ForwardArgs& args) {
  return CallWithTerms(args, /*is_backward=*/false, /*deterministic=*/true);
}
inline AttentionCall CallOf(const BackwardArgs& args, bool deterministic) {
  AttentionCall call = CallWithTerms(args, /*is_backward=*/true, deterministic);
  call.wants_dbias = args.dbias != nullptr;
  call.wants_dslopes = args.dslopes != nullptr;
  call.sums_dq = args.dq_sum != nullptr;
  call.has_float_grads = args.dkv_dtype == DType::kF32;
  return call;
}

// What a device asks of the caller for it.
struct AttentionNeeds {
  int64_t workspace_bytes = 0;
  // A group's query heads are worked on in so many parts, whose dk and dv are added at the end.
  int num_dkv_parts = 1;
  // dq is a sum in memory: float32, and without softmax_scale.
  bool is_dq_summed = false;
  // Of each batch row and head, in a sum of dq over several calls.
  int64_t dq_sum_words = 0;
  // dbias is a sum in memory: float32.
  bool is_dbias_summed = false;
  // What kernels derive from a mask that is known; empty where they need nothing.
  std::vector<int32_t> tile_list;
  // Of a list that an operation of the device makes, where the mask is not known; 0: none.
  int64_t tile_list_words = 0;
  // An estimate of the time that the list takes, to choose between lists of the same pairs.
  int64_t tile_cost = 0;
  // By what the list was made. A handler refuses a list with another stamp than its own.
  int32_t tile_stamp = 0;
};

}  // namespace jax_magi

#endif  // JAX_MAGI_ATTENTION_H_
