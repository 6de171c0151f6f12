// The kernel that finishes the gradients after the backward kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_FINISH_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_FINISH_H_

#include <cuda_runtime.h>

#include "cc/attention.h"
#include "cc/cuda/attention/backward_workspace.h"

namespace jax_magi::cuda {

// Float32 dK and dV of the parts of a group's query heads: dK is [num_parts, batch, k_len,
// num_kv_heads, head_dim], followed by dV in the same layout. Empty if there is only one part.
struct DkvParts {
  float* data;
  int num_parts;
};

inline int64_t DkvPartsWords(const AttentionShape& shape, int num_parts) {
  if (num_parts == 1) return 0;
  return num_parts * shape.batch * shape.k_len * shape.num_kv_heads *
         (shape.head_dim + shape.value_dim);
}

// Computes args.dq = softmax_scale * sum, in the layout and dtype of dq, unless later calls
// continue the sum; and args.dk and args.dv as sums of the parts, if there are several. The kernel
// may start before the previous one has ended, and waits for it.
cudaError_t FinishBackward(const BackwardArgs& args, const DqSum& sum, const DkvParts& parts,
                           cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_FINISH_H_
