// What helps computation and communication to run at the same time: the launchers.

#ifndef JAX_MAGI_CUDA_OVERLAP_OVERLAP_H_
#define JAX_MAGI_CUDA_OVERLAP_OVERLAP_H_

#include <cstdint>

#include "cc/cuda/status.h"

namespace jax_magi::cuda {

// Bytes that KernelBarrier works in.
int64_t KernelBarrierWorkspace();

// Ends when some other kernel is on a streaming multiprocessor, or after about 0.1 ms: what comes
// next on the stream then cannot take the place of communication that was started before.
Status KernelBarrier(void* workspace, cudaStream_t stream);

// Stands in for communication where there is but one GPU: `num_sms` blocks of threads, each alone
// on a streaming multiprocessor, copy `src` to `dst` `num_rounds` times; in clusters of
// `cluster_size`, all blocks of which have to find a place at once. It begins `delay_us` after
// `stream` comes here, and runs on a stream of its own, with the priority that XLA gives to
// communication.
struct StandIn {
  const void* src;
  void* dst;
  int64_t num_bytes;
  int num_sms, num_rounds, cluster_size, delay_us;
};
Status StartStandIn(const StandIn& stand_in, cudaStream_t stream);
// Makes `stream` wait for the last that was started.
Status WaitForStandIn(cudaStream_t stream);

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_OVERLAP_OVERLAP_H_
