// The launchers of operations that help computation and communication to overlap.

#ifndef JAX_MAGI_CUDA_OVERLAP_OVERLAP_H_
#define JAX_MAGI_CUDA_OVERLAP_OVERLAP_H_

#include <cstdint>

#include "cc/cuda/status.h"

namespace jax_magi::cuda {

// Bytes of workspace that KernelBarrier needs.
int64_t KernelBarrierWorkspace();

// Ends when another kernel runs on some SM, or after about 0.1 ms: what comes next on the stream
// then cannot take the place of communication that was started before.
Status KernelBarrier(void* workspace, cudaStream_t stream);

// Stands in for communication if there is only one GPU: `num_sms` CTAs, each alone on an SM, copy
// `src` to `dst` `num_rounds` times, in clusters of `cluster_size`, whose CTAs must all find a
// place at once. The copy begins `delay_us` after `stream` gets here, and runs on a stream of its
// own, with the priority that XLA gives to communication.
struct StandIn {
  const void* src;
  void* dst;
  int64_t num_bytes;
  int num_sms, num_rounds, cluster_size, delay_us;
};
Status StartStandIn(const StandIn& stand_in, cudaStream_t stream);
// Makes `stream` wait for the last stand-in that was started.
Status WaitForStandIn(cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_OVERLAP_OVERLAP_H_
