// The backward kernel's data in the workspace: the float32 sum of dQ, to which CTAs add a run of
// rows of one panel at a time, and the statistics of queries. If dQ is summed over several calls,
// the caller owns the sum, in the same layout.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_WORKSPACE_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_WORKSPACE_H_

#include "cc/attention.h"

namespace jax_magi::cuda {

// The dims of a panel, given all dims of the kernel. One addition covers one panel.
JAX_MAGI_INLINE constexpr int DqPanelDims(int num_dims) { return num_dims == 192 ? 96 : 64; }

// [batch, num_q_heads, num_panels, rows, DqPanelDims], not multiplied by softmax_scale. There are
// DqSumRows(q_len) rows, in groups of eight laid out by DqSumPlace, or beyond 128 dims by
// DqSumPlaceByQuery.
struct DqSum {
  float* data;
  int num_dims;  // The dims of the kernel, which may exceed head_dim.
};

// The statistics of eight queries as the kernel reads them, in an array [batch, num_q_heads, padded
// queries / 8].
struct alignas(64) QueryStatistic {
  // -lse in exponents of 2; -inf for fully masked rows and for padding, whose probabilities are
  // therefore 0.
  float start[8];
  float delta[8];
};

// Query blocks begin at multiples of this, and so do key blocks and key tiles if the Tiling says
// so.
constexpr int kPositionAlignment = 8;

JAX_MAGI_INLINE int AlignPosition(int position) {
  return (position + kPositionAlignment - 1) / kPositionAlignment * kPositionAlignment;
}

inline int DqSumRows(int64_t q_len) { return AlignPosition(static_cast<int>(q_len)); }

// The number of queries with statistics per head, so large that no query block extends past them.
inline int PaddedQueries(int64_t q_len) {
  constexpr int kLongestBlock = 128;
  return Max(AlignPosition(static_cast<int>(q_len)), kLongestBlock);
}

// Words per batch element and head.
inline int64_t DqSumWords(const AttentionShape& shape, int num_dims) {
  return int64_t{num_dims} * DqSumRows(shape.q_len);
}
inline int64_t DqSumBytes(const AttentionShape& shape, int num_dims) {
  return shape.batch * shape.num_q_heads * DqSumWords(shape, num_dims) * sizeof(float);
}

// The offset of an element within eight queries of a panel, for a thread that holds each dim of two
// queries. The two are adjacent, and the words that a warp stores at once, for every second query,
// lie in different banks.
JAX_MAGI_INLINE int DqSumPlace(int query, int dim) {
  const int pair = query / 2;
  return pair * 128 + ((dim / 4) ^ (pair % 4)) * 8 + dim % 4 * 2 + query % 2;
}

// The same for a thread that holds two dims of a query: the words that a warp stores at once are
// contiguous.
JAX_MAGI_INLINE int DqSumPlaceByQuery(int query, int dim) {
  return dim / 8 * 64 + query * 8 + dim % 8;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_WORKSPACE_H_
