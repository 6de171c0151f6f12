// Attention on the CPU, forward and backward, in parallel over tiles.

#ifndef JAX_MAGI_CPU_ATTENTION_H_
#define JAX_MAGI_CPU_ATTENTION_H_

#include <cstdint>
#include <functional>

#include "cc/attention.h"

namespace jax_magi::cpu {

// Runs `work(i, scratch)` for i in [0, num_tasks), each call with `scratch_floats` floats of its
// own, 64-byte aligned. Returns false if memory runs out; then no work was done.
using ParallelFor = std::function<bool(int64_t num_tasks, int64_t scratch_floats,
                                       const std::function<void(int64_t, float*)>& work)>;

// Both return false if memory ran out.
bool AttentionForward(const ForwardArgs& args, const ParallelFor& parallel_for);
bool AttentionBackward(const BackwardArgs& args, int64_t num_threads,
                       const ParallelFor& parallel_for);

}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_ATTENTION_H_
