// What the backward kernel finds in the workspace: the float32 sum of dQ, to which blocks of
// threads add a run of rows of a panel at a time; and the statistics of queries. A sum over several
// calls is the caller's, and looks the same.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_WORKSPACE_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_WORKSPACE_H_

#include "cc/attention.h"

namespace jax_magi::cuda {

// The dims of a panel, of all that a kernel has: so many are added at once.
JAX_MAGI_INLINE constexpr int DqPanelDims(int num_dims) { return num_dims == 192 ? 96 : 64; }

// [batch, num_q_heads, num_panels, rows, DqPanelDims], without softmax_scale: DqSumRows(q_len)
// rows, eight by eight as DqSumPlace says, or DqSumPlaceByQuery beyond 128 dims.
struct DqSum {
  float* data;
  int num_dims;  // That the kernel has: some may be past head_dim.
};

// Statistics of eight queries as the kernel reads them, in [batch, num_q_heads, padded queries /
// 8].
struct alignas(64) QueryStatistic {
  // -lse, in exponents of 2; -inf for rows that see nothing, and past the
  // last: their probabilities are then 0.
  float start[8];
  float delta[8];
};

// Blocks of queries begin at multiples of this; and blocks and tiles of keys, where a Tiling says
// so.
constexpr int kPositionAlignment = 8;

JAX_MAGI_INLINE int AlignPosition(int position) {
  return (position + kPositionAlignment - 1) / kPositionAlignment * kPositionAlignment;
}

inline int DqSumRows(int64_t q_len) { return AlignPosition(static_cast<int>(q_len)); }

// Statistics of a head, so many that no block of queries reaches past them.
inline int PaddedQueries(int64_t q_len) {
  constexpr int kLongestBlock = 128;
  return Max(AlignPosition(static_cast<int>(q_len)), kLongestBlock);
}

// Of a batch row and head.
inline int64_t DqSumWords(const AttentionShape& shape, int num_dims) {
  return int64_t{num_dims} * DqSumRows(shape.q_len);
}
inline int64_t DqSumBytes(const AttentionShape& shape, int num_dims) {
  return shape.batch * shape.num_q_heads * DqSumWords(shape, num_dims) * sizeof(float);
}

// Where an element of eight queries is, in a panel. A thread has it for two queries, which lie side
// by side; and what a warp stores at once, of every second query, lies in different banks.
JAX_MAGI_INLINE int DqSumPlace(int query, int dim) {
  const int pair = query / 2;
  return pair * 128 + ((dim / 4) ^ (pair % 4)) * 8 + dim % 4 * 2 + query % 2;
}

// The same where a thread has two dims of a query: what a warp stores at once lies side by side.
JAX_MAGI_INLINE int DqSumPlaceByQuery(int query, int dim) {
  return dim / 8 * 64 + query * 8 + dim % 8;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_WORKSPACE_H_
