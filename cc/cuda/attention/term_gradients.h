// What runs before and after the backward kernel if gradients of a bias or of slopes are requested.

#ifndef JAX_MAGI_CUDA_ATTENTION_TERM_GRADIENTS_H_
#define JAX_MAGI_CUDA_ATTENTION_TERM_GRADIENTS_H_

#include <cuda_runtime.h>

#include "cc/attention.h"

namespace jax_magi::cuda {

// A bias gradient in which the pairs that no slice makes visible are to be filled with zeros.
struct HiddenPairs {
  uint16_t* dbias;  // [batch, num_heads, q_len, k_len], k_len a multiple of 8.
  const Slice* slices;
  int batch, num_heads, q_len, k_len;
  int num_slices, slice_stride;  // slice_stride is from one batch element to the next.
};

// The outputs of the kernel. Null: not requested.
struct TermGradients {
  // For a bias that TMA loads and that is not shared across batch or heads, in its dtype. The
  // kernel writes the visible pairs only.
  void* dbias;
  // For any other bias that differs from query to query: float32 sums with the strides of the bias.
  float* dbias_sums;
  // [batch, num_q_heads, k_len]: sums over queries of dS, and of dS * (j - i).
  float *key_sums, *key_moments;
  HiddenPairs hidden;  // The hidden pairs of dbias, if the kernel also fills them with zeros.
};

// Whether the bias is the same for all queries.
inline bool IsBiasByKey(const AttentionShape& shape, const BiasLayout& layout) {
  return layout.q_stride == 0 || shape.q_len == 1;
}

// Whether TMA can load blocks of the bias: its rows are multiples of 16 bytes, and need no cast.
inline bool IsBiasInTiles(const AttentionShape& shape, const BiasLayout& layout, DType dtype) {
  return !IsBiasByKey(shape, layout) && layout.dtype == dtype && shape.k_len % 8 == 0;
}

// Whether dbias is accumulated in memory, in float32. It is not if sums by key are used instead, or
// if each element comes from a single pair and TMA can store it.
inline bool IsDbiasSummed(const AttentionShape& shape, const BiasLayout& layout, DType dtype) {
  const bool is_shared = layout.batch_stride == 0 || layout.head_stride == 0;
  return !IsBiasByKey(shape, layout) && (is_shared || !IsBiasInTiles(shape, layout, dtype));
}

// Whether slopes are the only term, without a cap and without a gradient of the slopes.
inline bool AreSlopesAlone(bool has_cap, bool has_bias, bool wants_dslopes) {
  return !has_cap && !has_bias && !wants_dslopes;
}

// Words of workspace for sums by key.
inline int64_t TermGradientsWords(const AttentionCall& call) {
  const AttentionShape& shape = call.shape;
  const bool has_sums = call.wants_dbias && IsBiasByKey(shape, call.bias_layout);
  return (has_sums + call.wants_dslopes) * shape.batch * shape.num_q_heads * shape.k_len;
}

// Called before the kernel: determines what the kernel writes and where, and zero-fills what the
// kernel adds to or leaves out. `sums` points to workspace.
cudaError_t PrepareTermGradients(const BackwardArgs& args, float* sums, bool can_zero_hidden,
                                 cudaStream_t stream, TermGradients* gradients);

// Called after the kernel: turns sums by key into gradients.
cudaError_t FinishTermGradients(const BackwardArgs& args, const TermGradients& gradients,
                                cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TERM_GRADIENTS_H_
