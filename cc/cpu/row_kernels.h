// The CPU work of the softmax that is compiled once per instruction set, and the choice among the
// results.

#ifndef JAX_MAGI_CPU_ROW_KERNELS_H_
#define JAX_MAGI_CPU_ROW_KERNELS_H_

#include "cc/softmax.h"

namespace jax_magi::cpu {

// Each finishes one row of [batch, heads, q_len], with RowScratch floats, 64-byte aligned.
struct RowKernels {
  void (*forward)(const SoftmaxForwardArgs& args, int64_t row, float* scratch);
  void (*backward)(const SoftmaxBackwardArgs& args, int64_t row, float* scratch);
};

// A row of each array, in whole vectors of the widest instruction set.
constexpr int64_t RowFloats(int64_t k_len) { return (k_len + 15) / 16 * 16; }
constexpr int64_t RowScratch(int64_t k_len) { return 2 * RowFloats(k_len); }

// The widest variant this processor runs.
const RowKernels& SelectRowKernels();

}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_ROW_KERNELS_H_
