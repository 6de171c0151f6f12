// The CPU work of the softmax, which is compiled once per instruction set, and the selection of a
// variant.

#ifndef JAX_MAGI_CPU_ROW_KERNELS_H_
#define JAX_MAGI_CPU_ROW_KERNELS_H_

#include "cc/softmax.h"

namespace jax_magi::cpu {

// Each function finishes one row of [batch, heads, q_len], with RowScratch floats of scratch,
// 64-byte aligned.
struct RowKernels {
  void (*forward)(const SoftmaxForwardArgs& args, int64_t row, float* scratch);
  void (*backward)(const SoftmaxBackwardArgs& args, int64_t row, float* scratch);
};

// The floats of one row of an array, rounded up to whole vectors of the widest instruction set.
constexpr int64_t RowFloats(int64_t k_len) { return (k_len + 15) / 16 * 16; }
constexpr int64_t RowScratch(int64_t k_len) { return 2 * RowFloats(k_len); }

// The widest variant that this processor supports.
const RowKernels& SelectRowKernels();

}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_ROW_KERNELS_H_
