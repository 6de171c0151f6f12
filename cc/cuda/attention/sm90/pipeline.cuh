// What producers and consumers of the kernels share: the rings of shared memory, and what passes
// through them.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_PIPELINE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_PIPELINE_CUH_

#include "cc/cuda/attention/sm90/hopper.cuh"
#include "cc/cuda/attention/work.cuh"

namespace jax_magi::cuda::sm90 {

// A position in a ring of stages. The phase flips each time the position wraps around.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ RingPosition Before() const {
    return stage == 0 ? RingPosition{kStages - 1, phase ^ 1} : RingPosition{stage - 1, phase};
  }
};

// One lane arrives for its warp.
__device__ __forceinline__ void ArriveByWarp(uint64_t* barrier, int thread) {
  __syncwarp();
  if (thread % 32 == 0) Arrive(barrier);
}

// One lane per CTA of the cluster arrives at that CTA's barrier for the whole warp. Lane 0, which
// reads for the warp (LoadByWarp), arrives at the barrier of its own CTA.
template <int kClusterSize, bool kIsOrdered = false>
__device__ __forceinline__ void ArriveByWarpAtAll(uint64_t* barrier, int thread) {
  if constexpr (kClusterSize == 1) {
    ArriveByWarp(barrier, thread);
  } else {
    __syncwarp();
    if (thread % 32 < kClusterSize) {
      const auto arrive = kIsOrdered ? ArriveAt : ArriveUnorderedAt;
      arrive(barrier, ClusterRank() ^ thread % 32);
    }
  }
}

// Initializes the barriers of a ring. `full` completes after `full_arrivals` arrivals of the
// producer, and `empty` after `empty_arrivals` of consumers: every thread arrives if all threads
// read words of the stage, otherwise one thread per warp does.
template <int kStages>
__device__ __forceinline__ void InitRing(uint64_t (&full)[kStages], uint64_t (&empty)[kStages],
                                         int full_arrivals, int empty_arrivals) {
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    InitBarrier(&full[i], full_arrivals);
    InitBarrier(&empty[i], empty_arrivals);
  }
}

// Passes the next work number of a cluster of two from its first CTA to the second. Both CTAs must
// process the same work in the same order, as each waits for the part that the other one loads.
struct ClusterWork {
  uint32_t next;
  // `full`, in the second CTA: the number is there. `empty`, in the first one: the number was read.
  uint64_t full, empty;

  __device__ __forceinline__ void Init() {
    InitBarrier(&full, 1);
    InitBarrier(&empty, 1);
  }

  // Returns the number of the `count`th work item after the first. Called by one warp of each CTA.
  __device__ __forceinline__ uint32_t Next(const WorkParams& params, int lane, uint32_t count) {
    uint32_t number = 0;
    // All lanes wait together, and there is a single exit: otherwise ptxas schedules the consumers'
    // loop badly.
    if (ClusterRank() == 0) {
      Wait(&empty, count % 2 ^ 1);
      __syncwarp();  // All lanes have passed when the store below lets the barrier advance.
      if (lane == 0) {
        number = gridDim.x / 2 + atomicAdd(&params.counter->next_work, 1);
        StoreAt(&next, &full, 1, number);
      }
    } else {
      if (lane == 0) ArriveExpectBytes(&full, sizeof(next));
      Wait(&full, count % 2);
      if (lane == 0) {
        number = *const_cast<const volatile uint32_t*>(&next);
        ArriveUnorderedAt(&empty, 0);  // `next` is overwritten when the next number is requested.
      }
    }
    return __shfl_sync(~0u, number, 0);
  }
};

// Rows of a box in which LoadPanels loads a block.
template <int kClusterSize, int kDim, int kRows>
constexpr int kPanelRows = kDim == 64 ? kRows / kClusterSize : kRows;

// Loads a block of rows from `row` on, which stream past the tile, in panels of 64 dims. In a
// cluster of two, each CTA loads half of the block for both: one panel of two, or half of the rows
// of the only panel. Called by one lane. head() is evaluated for each box, because registers are
// scarce.
template <int kClusterSize, int kDim, int kRows, typename Element, typename Head>
__device__ __forceinline__ void LoadPanels(const CUtensorMap& map, uint64_t* full, Element* dst,
                                           Head head, int row, const WorkItem& item) {
  if constexpr (kClusterSize == 1) {
#pragma unroll
    for (int d = 0; d < kDim; d += 64) {
      LoadBox(&map, full, dst + d * kRows, d, head(), row, item.tile.batch);
    }
  } else {
    const int part = static_cast<int>(ClusterRank());
    const int d = kDim == 64 ? 0 : 64 * part;
    const int skipped = kDim == 64 ? part * kPanelRows<kClusterSize, kDim, kRows> : 0;
    LoadBoxForRanks(&map, full, dst + d * kRows + skipped * 64, (1 << kClusterSize) - 1, d, head(),
                    row + skipped, item.tile.batch);
  }
}

// Waits until no other CTA needs the shared memory of this one. Each role calls this separately: a
// single call after both roles makes ptxas schedule the consumers' loop badly.
template <typename Config>
__device__ __forceinline__ void WaitForClusterToEnd() {
  if constexpr (Config::kClusterSize > 1) ClusterSync();
}

// Waits until barriers are initialized: in a cluster, other CTAs arrive at them, too.
template <typename Config>
__device__ __forceinline__ void WaitForBarriers() {
  if constexpr (Config::kClusterSize == 1) {
    __syncthreads();
  } else {
    ClusterSync();
  }
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_PIPELINE_CUH_
