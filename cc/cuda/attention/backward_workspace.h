// What the backward kernel finds in the workspace: the float32 sum of dQ, to which blocks of
// threads add a run of rows of a panel at a time; and the statistics of queries. A sum over several
// calls is the caller's, and looks the same.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_WORKSPACE_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_WORKSPACE_H_

#include "cc/attention.h"

namespace jax_magi::cuda {

// [batch, num_q_heads, num_panels, rows, 64], without softmax_scale: DqSumRows(q_len) rows, two by
// two as DqSumPlace says.
struct DqSum {
  float* data;
  int num_panels;  // Of 64 dims.
};

// Statistics of eight queries as the kernel reads them, in [batch, num_q_heads, padded queries /
// 8].
struct alignas(64) QueryStatistic {
  // -lse, in exponents of 2; -inf for rows that see nothing, and past the
  // last: their probabilities are then 0.
  float start[8];
  float delta[8];
};

// Up to where statistics may begin.
inline int64_t AlignStatistics(int64_t num_bytes) {
  return (num_bytes + alignof(QueryStatistic) - 1) / alignof(QueryStatistic) *
         alignof(QueryStatistic);
}

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
inline int64_t DqSumWords(const AttentionShape& shape, int num_panels) {
  return int64_t{num_panels} * DqSumRows(shape.q_len) * 64;
}
inline int64_t DqSumBytes(const AttentionShape& shape, int num_panels) {
  return shape.batch * shape.num_q_heads * DqSumWords(shape, num_panels) * sizeof(float);
}

// Where an element of eight queries is, in a panel. A thread has it for two queries, which lie side
// by side; and what a warp stores at once, of every second query, lies in different banks.
JAX_MAGI_INLINE int DqSumPlace(int query, int dim) {
  const int pair = query / 2;
  return pair * 128 + ((dim / 4) ^ (pair % 4)) * 8 + dim % 4 * 2 + query % 2;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_WORKSPACE_H_
