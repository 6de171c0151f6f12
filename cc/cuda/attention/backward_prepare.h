// What the backward kernel's operands go through before it: one kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_PREPARE_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_PREPARE_H_

#include "cc/attention.h"
#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// One for eight queries of a head.
inline int64_t NumStatistics(const AttentionShape& shape) {
  return shape.batch * shape.num_q_heads * (PaddedQueries(shape.q_len) / 8);
}

// Memory that has to be zero.
struct ZeroBytes {
  void* data;
  int64_t num_bytes;
};

// Tiles whose gradients are added to args.dk and args.dv, which are float32: so many thresholds of
// the list are above theirs. 0: there are none.
struct AddedTiles {
  const TileList* list;
  int num_thresholds;
  int tile_rows;
};

// Makes the statistics from args.lse and args.delta: start = -lse in exponents of 2. Checks the
// list, resets the counter, and fills `zeros`, whole vectors of 16 bytes, with zeros, and the rows
// of added tiles. The kernel after it may start at once, and must wait for it with
// griddepcontrol.wait.
cudaError_t PrepareBackward(const BackwardArgs& args, const ListCheck& check,
                            const ZeroBytes& zeros, const AddedTiles& added,
                            QueryStatistic* statistics, WorkCounter* counter, cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_PREPARE_H_
