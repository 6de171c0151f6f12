// Attention on the CPU, forward and backward, in parallel over tiles.

#ifndef JAX_MAGI_CPU_ATTENTION_H_
#define JAX_MAGI_CPU_ATTENTION_H_

#include "cc/attention.h"
#include "cc/cpu/parallel_for.h"

namespace jax_magi::cpu {

// The head of a sum of dq over several calls is [q_len, head_dim].
inline int64_t DqSumWords(const AttentionShape& shape) { return shape.q_len * shape.head_dim; }

// Both return false if memory runs out.
bool AttentionForward(const ForwardArgs& args, const ParallelFor& parallel_for);
bool AttentionBackward(const BackwardArgs& args, int64_t num_threads,
                       const ParallelFor& parallel_for);

}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_ATTENTION_H_
