// Zero-fills hidden pairs with TMA.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_HIDDEN_PAIRS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_HIDDEN_PAIRS_CUH_

#include "cc/cuda/attention/hidden_pairs.cuh"
#include "cc/cuda/attention/sm90/hopper.cuh"

namespace jax_magi::cuda::sm90 {

// Shared memory that holds zeros.
struct Zeros {
  static constexpr bool kCanCopy = true;
  const void* data;
  int count;  // Number of 16-bit elements, a multiple of 8.

  // Starts to copy `num` zeros, a multiple of 8.
  __device__ __forceinline__ void CopyTo(uint16_t* to, int num) const {
    for (; num > 0; num -= count, to += count) StoreBulk(to, data, 2 * Min(num, count));
  }
  __device__ __forceinline__ static void Commit() { CommitReduce(); }
};

// Fetches queries of the batch from the counter until none are left. `memory` is filled with zeros,
// and no longer being read when this returns.
template <int kThreads, typename Shared, typename Sync, int kElements, typename Element>
__device__ __forceinline__ void ZeroAllHidden(const HiddenPairs& pairs, uint32_t* next_query,
                                              int thread, Shared& shared, Sync sync,
                                              Element (&memory)[kElements]) {
  static_assert(sizeof(Element) == 2 && kElements % (8 * kThreads) == 0, "whole vectors");
  const uint32_t num_queries = static_cast<uint32_t>(pairs.batch) * pairs.q_len;
  sync();  // All threads have read the contents of an earlier call.
  for (int i = thread; i < kElements / 8; i += kThreads) {
    reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
  }
  FenceAsyncProxy();
  while (true) {
    if (thread == 0) shared.query = atomicAdd(next_query, 1);
    sync();
    const uint32_t query = shared.query;
    if (query >= num_queries) break;
    ZeroHidden<kThreads>(pairs, query, thread, shared, sync, Zeros{memory, kElements});
    sync();  // All threads have read what is shared.
  }
  WaitReduce();
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_HIDDEN_PAIRS_CUH_
