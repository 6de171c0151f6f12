// Fused scale + mask + softmax on the CPU, in parallel over rows.

#ifndef JAX_MAGI_CPU_SOFTMAX_H_
#define JAX_MAGI_CPU_SOFTMAX_H_

#include "cc/cpu/parallel_for.h"
#include "cc/softmax.h"

namespace jax_magi::cpu {

// Both return false if memory runs out.
bool SoftmaxForward(const SoftmaxForwardArgs& args, const ParallelFor& parallel_for);
bool SoftmaxBackward(const SoftmaxBackwardArgs& args, const ParallelFor& parallel_for);

}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_SOFTMAX_H_
