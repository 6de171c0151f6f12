// The definition of one attention call, for every device.
//
// The logits of visible pairs (i, j), where i is a query's position in q and j a key's in k, are
//
//   S = softmax_scale * q k^T + bias + slope * (j - i)
//
// and a soft cap is applied to them if there is one. The forward pass computes
//
//   lse = log(sum of exp(S) + exp(sink)),   out = exp(S - lse) v,   max_logits = max of S, uncapped
//
// and the backward pass, with P = exp(S - lse), dP = dout v^T and dS = P (dP - delta), multiplied
// by the derivative of the soft cap,
//
//   dq = softmax_scale * dS k,   dk = softmax_scale * dS^T q,   dv = P^T dout,
//   dbias = dS, summed over all pairs that share an element,   dslopes = sum of dS * (j - i).
//
// A bias of -inf hides its pair. Any other non-finite bias propagates to the results.
//
// lse and delta are float32, in natural units, and the same for every device: lse is what the
// forward pass returns, and delta = rowsum(dout * out) - dlse. Both may cover more keys than this
// call has.
//
// Several calls ("stages") may process different keys of the same queries and share results: a
// forward call then merges its results into those of earlier calls by lse, and a backward call adds
// its dq to theirs.
//
// Layouts (row-major):
//   q, dout, dq, out     [batch, q_len, num_q_heads, head_dim or value_dim]
//   k, v, dk, dv         [batch, k_len, num_kv_heads, head_dim or value_dim]
//   slices               [batch or 1, num_slices, 6]
//   sink, max_logits     [batch, num_q_heads]
//   bias, dbias          [batch or 1, num_q_heads or 1, q_len or 1, k_len]
//   alibi_slopes         [batch, num_q_heads], also dslopes
//   lse, delta           [batch, q_len, num_q_heads]

#ifndef JAX_MAGI_ATTENTION_H_
#define JAX_MAGI_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "cc/architecture.h"
#include "cc/dtype.h"
#include "cc/mask.h"

namespace jax_magi {

struct AttentionShape {
  int64_t batch, q_len, k_len, num_q_heads, num_kv_heads, head_dim, value_dim;
  int64_t num_slices;
  bool shared_slices;  // All batch elements share one slice list.

  // Number of query heads per kv head.
  JAX_MAGI_INLINE int64_t group() const { return num_q_heads / num_kv_heads; }
  JAX_MAGI_INLINE int64_t num_statistics() const { return batch * q_len * num_q_heads; }
};

struct AttentionParams {
  float softmax_scale;
  float softcap;  // 0: no soft cap.
};

// The element of the bias for a pair is at
// batch * batch_stride + head * head_stride + query * q_stride + key. A stride is 0 if and only if
// one element is shared by several batch elements, heads or queries.
struct BiasLayout {
  DType dtype;  // The dtype of q, or float32.
  int64_t batch_stride, head_stride, q_stride;
};

// The layout of a bias whose dimensions are `batch`, `heads` and `rows`, each of them 1 or the
// call's size.
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
  DType dtype;      // The dtype of q, k and v.
  DType out_dtype;  // The same, or float32 if the caller continues to merge.
  const void *q, *k, *v;
  const Slice* slices;
  const float* sink;  // -inf: none.
  const void* bias;   // Null: none.
  BiasLayout bias_layout;
  const float* alibi_slopes;  // Null: none.
  void* out;
  float* lse;         // -inf for fully masked rows.
  float* max_logits;  // -inf for fully masked heads.
  // The output of earlier calls over other keys, or null. Its lse and max_logits are in the arrays
  // above. If it is float32, this call merges its results with them. It then equals `out` if `out`
  // is float32, and fully masked rows stay unchanged; otherwise this is the last call, which rounds
  // to `out`. Only the first call uses the sink. If it is of `dtype`, it equals `out`, and each
  // row sees keys in one of the calls only: the others leave it unchanged.
  const void* running_out;
  DType running_dtype;

  // Whether rows that see no key of this call stay unchanged.
  bool keeps_unseen_rows() const {
    return running_out != nullptr && (running_dtype != DType::kF32 || out_dtype == DType::kF32);
  }
};

struct BackwardArgs {
  AttentionShape shape;
  AttentionParams params;
  DType dtype;                // The dtype of q, k, v and dout.
  DType dq_dtype, dkv_dtype;  // The same, or float32 if the caller continues to sum.
  const void *q, *k, *v, *dout;
  const float *lse, *delta;
  const Slice* slices;
  const void* bias;  // Null: none.
  BiasLayout bias_layout;
  const float* alibi_slopes;  // Null: none.
  // If AttentionNeeds::is_dq_summed, dq is float32 and not multiplied by softmax_scale.
  void *dq, *dk, *dv;
  // A sum of dq over several calls; this call adds to the sum instead of writing dq. It is float32,
  // not multiplied by softmax_scale, [batch, num_q_heads, dq_sum_words]; the order of elements
  // within a head is private to the device. Null: none.
  float* dq_sum;
  int64_t dq_sum_words;
  // The size of the bias; elements that no visible pair uses get 0. Null: not requested.
  void* dbias;
  DType dbias_dtype;  // The bias's dtype, or float32 if AttentionNeeds::is_dbias_summed.
  float* dslopes;     // Null: not requested.
};

// What is known about a call when it is traced, before there is any data.
struct AttentionCall {
  AttentionShape shape;
  DType dtype;
  bool has_softcap, is_backward, deterministic;
  bool has_bias = false, has_alibi = false;
  BiasLayout bias_layout{};  // Only if there is a bias.
  bool wants_dbias = false, wants_dslopes = false;
  bool sums_dq = false;          // Whether dq is summed over several calls.
  bool has_float_grads = false;  // Whether dk and dv are float32 rather than `dtype`.
  int num_sms = 0;               // SMs of the GPU that the call is traced for; 0: unknown.
  Target target{};
};

// The call that these operands belong to.
template <typename Args>
AttentionCall CallWithTerms(const Args& args, bool is_backward, bool deterministic,
                            const Target& target) {
  AttentionCall call{args.shape, args.dtype, args.params.softcap != 0.0f, is_backward,
                     deterministic};
  call.target = target;
  call.has_bias = args.bias != nullptr;
  call.has_alibi = args.alibi_slopes != nullptr;
  call.bias_layout = args.bias_layout;
  return call;
}
inline AttentionCall CallOf(const ForwardArgs& args, const Target& target) {
  return CallWithTerms(args, /*is_backward=*/false, /*deterministic=*/true, target);
}
inline AttentionCall CallOf(const BackwardArgs& args, bool deterministic, const Target& target) {
  AttentionCall call = CallWithTerms(args, /*is_backward=*/true, deterministic, target);
  call.wants_dbias = args.dbias != nullptr;
  call.wants_dslopes = args.dslopes != nullptr;
  call.sums_dq = args.dq_sum != nullptr;
  call.has_float_grads = args.dkv_dtype == DType::kF32;
  return call;
}

// What the device's implementation requires from the caller.
struct AttentionNeeds {
  int64_t workspace_bytes = 0;
  // The query heads of a group are split into this many parts, whose dk and dv are summed at the
  // end.
  int num_dkv_parts = 1;
  // dq is accumulated in memory: it is float32 and not multiplied by softmax_scale.
  bool is_dq_summed = false;
  // Words per batch element and head in a sum of dq over several calls.
  int64_t dq_sum_words = 0;
  // dbias is accumulated in memory: it is float32.
  bool is_dbias_summed = false;
  // The tile list, if the mask is known; empty if the kernels need none.
  std::vector<int32_t> tile_list;
  // Words of the tile list that a device operation makes if the mask is not known; 0: none.
  int64_t tile_list_words = 0;
  // The estimated run time of the list, to compare lists that cover the same pairs.
  int64_t tile_cost = 0;
  // Identifies the tiling that the list was made for. A handler rejects a list with a different
  // stamp.
  int32_t tile_stamp = 0;
};

}  // namespace jax_magi

#endif  // JAX_MAGI_ATTENTION_H_
