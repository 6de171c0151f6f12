// What surrounds the backward kernel where gradients of a bias or of slopes are wanted.

#ifndef JAX_MAGI_CUDA_ATTENTION_TERM_GRADIENTS_H_
#define JAX_MAGI_CUDA_ATTENTION_TERM_GRADIENTS_H_

#include <cuda_runtime.h>

#include "cc/attention.h"

namespace jax_magi::cuda {

// A gradient of a bias in which pairs that no slice shows get zeros.
struct HiddenPairs {
  uint16_t* dbias;  // [batch, num_heads, q_len, k_len], k_len a multiple of 8.
  const Slice* slices;
  int batch, num_heads, q_len, k_len;
  int num_slices, slice_stride;  // The latter from one batch element to the next.
};

// What the kernel writes. Null: it is not wanted.
struct TermGradients {
  void* dbias;  // Of a bias by TMA that nothing shares, in its element type: visible pairs alone.
  // Of any other bias that differs from query to query, in float32, with its strides: added to.
  float* dbias_sums;
  // [batch, num_q_heads, k_len]: dS summed over queries, and the same of dS * (j - i). Added to.
  float *key_sums, *key_moments;
  HiddenPairs hidden;  // Of dbias, if the kernel writes zeros, too.
};

// Whether the bias is the same for all queries.
inline bool IsBiasByKey(const AttentionShape& shape, const BiasLayout& layout) {
  return layout.q_stride == 0 || shape.q_len == 1;
}

// Whether TMA takes blocks of the bias: its rows are whole 16 bytes, and nothing has to be cast.
inline bool IsBiasInTiles(const AttentionShape& shape, const BiasLayout& layout, DType dtype) {
  return !IsBiasByKey(shape, layout) && layout.dtype == dtype && shape.k_len % 8 == 0;
}

// Whether its gradient is summed in memory, in float32. That over queries is not, nor is one that
// has each element from one pair and TMA can store.
inline bool IsDbiasSummed(const AttentionShape& shape, const BiasLayout& layout, DType dtype) {
  const bool is_shared = layout.batch_stride == 0 || layout.head_stride == 0;
  return !IsBiasByKey(shape, layout) && (is_shared || !IsBiasInTiles(shape, layout, dtype));
}

// Whether there is nothing besides slopes to add to scores, no cap, and no gradient of slopes.
inline bool AreSlopesAlone(bool has_cap, bool has_bias, bool wants_dslopes) {
  return !has_cap && !has_bias && !wants_dslopes;
}

// Words of workspace, for sums by key.
inline int64_t TermGradientsWords(const AttentionCall& call) {
  const AttentionShape& shape = call.shape;
  const bool has_sums = call.wants_dbias && IsBiasByKey(shape, call.bias_layout);
  return (has_sums + call.wants_dslopes) * shape.batch * shape.num_q_heads * shape.k_len;
}

// Before the kernel: says what it shall write where, and fills with zeros what it will not write,
// or add to. `sums` are words of the workspace.
cudaError_t PrepareTermGradients(const BackwardArgs& args, float* sums, bool can_zero_hidden,
                                 cudaStream_t stream, TermGradients* gradients);

// After it: sums by key become gradients.
cudaError_t FinishTermGradients(const BackwardArgs& args, const TermGradients& gradients,
                                cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TERM_GRADIENTS_H_
