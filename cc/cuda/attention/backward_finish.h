// What gradients go through after the backward kernel: one kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_FINISH_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_FINISH_H_

#include <cuda_runtime.h>

#include "cc/attention.h"
#include "cc/cuda/attention/backward_workspace.h"

namespace jax_magi::cuda {

// dK and dV of parts of a group's query heads, float32: [num_parts, batch, k_len, num_kv_heads,
// head_dim], then the same of dV. With one part there is nothing here.
struct DkvParts {
  float* data;
  int num_parts;
};

inline int64_t DkvPartsWords(const AttentionShape& shape, int num_parts) {
  if (num_parts == 1) return 0;
  return num_parts * shape.batch * shape.k_len * shape.num_kv_heads *
         (shape.head_dim + shape.value_dim);
}

// args.dq = softmax_scale * sum, in its own order and dtype, unless the sum goes on in other calls;
// args.dk and args.dv are the sums of the parts, if there are several. It may start before the
// kernel before it has ended, and waits for it.
cudaError_t FinishBackward(const BackwardArgs& args, const DqSum& sum, const DkvParts& parts,
                           cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_FINISH_H_
