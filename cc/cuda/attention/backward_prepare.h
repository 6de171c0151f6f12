// The kernel that prepares the operands of the backward kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_PREPARE_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_PREPARE_H_

#include "cc/attention.h"
#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/attention/head_cuts.h"

namespace jax_magi::cuda {

// One statistic covers eight queries of a head.
inline int64_t NumStatistics(const AttentionShape& shape) {
  return shape.batch * shape.num_q_heads * (PaddedQueries(shape.q_len) / 8);
}

// Memory to be filled with zeros.
struct ZeroBytes {
  void* data;
  int64_t num_bytes;
};

// Tiles whose gradients are added to the float32 args.dk and args.dv: those of the first
// `num_weights` weights. If num_weights is 0, there are none.
struct AddedTiles {
  const TileList* list;
  TileWeights weights;
  int num_weights;
  int tile_rows;
};

// Makes the statistics from args.lse and args.delta, with start = -lse in exponents of 2. Checks
// the list, resets the counter, and zero-fills `zeros`, in vectors of 16 bytes, and the dk and dv
// rows of added tiles. The next kernel may start at once, and must wait for this one with
// griddepcontrol.wait.
cudaError_t PrepareBackward(const BackwardArgs& args, const ListCheck& check,
                            const ZeroBytes& zeros, const AddedTiles& added,
                            QueryStatistic* statistics, WorkCounter* counter, cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_PREPARE_H_
