// What the backward kernel's operands go through before it: one kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_PREPARE_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_PREPARE_H_

#include "cc/attention.h"
#include "cc/cuda/attention/dq_sum.h"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// Statistics of queries as the kernel reads them, [batch, num_q_heads, q_len]: a block of queries
// of one head lies together.
struct QueryStatistics {
  // -lse, in units of scores or of exponents of 2; -inf for rows that see nothing, whose
  // probabilities are then 0.
  float* start;
  float* delta;
};

// Bytes of workspace that they take. What follows them is aligned like a TileList.
inline int64_t StatisticsBytes(const AttentionShape& shape) {
  const int64_t num_bytes = 2 * shape.num_statistics() * sizeof(float);
  return (num_bytes + alignof(TileList) - 1) / alignof(TileList) * alignof(TileList);
}

inline QueryStatistics StatisticsAt(void* memory, const AttentionShape& shape) {
  auto* start = static_cast<float*>(memory);
  return {start, start + shape.num_statistics()};
}

// Makes the statistics from args.lse and args.delta: start = -lse * factor. Resets the counter, and
// fills the sum of dq with zeros. The kernel after it may start at once, and must wait
// for it with griddepcontrol.wait.
cudaError_t PrepareBackward(const BackwardArgs& args, float factor, const DqSum& sum,
                            const QueryStatistics& statistics, WorkCounter* counter,
                            cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_PREPARE_H_
