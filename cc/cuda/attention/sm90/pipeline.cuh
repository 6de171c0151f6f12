// What the kernels' producers and consumers share: rings of shared memory, and what goes through
// them.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_PIPELINE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_PIPELINE_CUH_

#include "cc/cuda/attention/sm90/hopper.cuh"
#include "cc/cuda/attention/work.cuh"

namespace jax_magi::cuda {

// One block of columns, as the producer hands it on.
struct alignas(16) BlockInfo {
  Slice slice;
  int32_t begin;
  int32_t flags;
};
enum BlockFlag { kMasked = 1, kLast = 2 };

// Position in a ring of stages. The phase flips at each turn of the ring.
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

// One thread arrives for its warp.
__device__ __forceinline__ void ArriveByWarp(uint64_t* barrier, int thread) {
  __syncwarp();
  if (thread % 32 == 0) Arrive(barrier);
}

// One thread arrives for its warp at the barrier of each block of threads of its cluster: at its
// own, the one that reads for it.
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

// A ring's barriers: `full` completes with so many arrivals of the producer, `empty` of consumers:
// of every thread where all have read words of the stage, else of a thread for each warp.
template <int kStages>
__device__ __forceinline__ void InitRing(uint64_t (&full)[kStages], uint64_t (&empty)[kStages],
                                         int full_arrivals, int empty_arrivals) {
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    InitBarrier(&full[i], full_arrivals);
    InitBarrier(&empty[i], empty_arrivals);
  }
}

// The next work of a cluster of two, from its first block of threads to the second. Both do the
// same in the same order, as they wait for each other's part of what they load.
struct ClusterWork {
  uint32_t next;
  uint64_t full, empty;  // The second one's: its number is there. The first one's: it was read.

  __device__ __forceinline__ void Init() {
    InitBarrier(&full, 1);
    InitBarrier(&empty, 1);
  }

  // Returns the number of the `count`th work after the first. For one warp of each.
  __device__ __forceinline__ uint32_t Next(const WorkParams& params, int lane, uint32_t count) {
    uint32_t number = 0;
    // Lanes wait together, and there is one way out: ptxas schedules the consumers' loop badly if
    // not.
    if (ClusterRank() == 0) {
      Wait(&empty, count % 2 ^ 1);
      __syncwarp();  // What follows lets the barrier go on.
      if (lane == 0) {
        number = gridDim.x / 2 + atomicAdd(&params.counter->next_work, 1);
        StoreAt(&next, &full, 1, number);
      }
    } else {
      if (lane == 0) ArriveExpectBytes(&full, sizeof(next));
      Wait(&full, count % 2);
      if (lane == 0) {
        number = *const_cast<const volatile uint32_t*>(&next);
        ArriveUnorderedAt(&empty, 0);  // It is written again when the next one is asked for.
      }
    }
    return __shfl_sync(~0u, number, 0);
  }
};

// Rows of a box in which LoadPanels loads a block.
template <int kClusterSize, int kDim, int kRows>
constexpr int kPanelRows = kDim == 64 ? kRows / kClusterSize : kRows;

// Loads a block of rows from `row` on, which stream past the tile, in panels of 64 dims. In a
// cluster of two, each block of threads loads half for both: a panel of two, or half of the rows of
// the only one. For one lane; head() is asked for each box, as registers are scarce.
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

// Until no other block of threads needs this one's shared memory. In each role for itself: behind
// both, it makes ptxas schedule the consumers' loop badly.
template <typename Config>
__device__ __forceinline__ void WaitForClusterToEnd() {
  if constexpr (Config::kClusterSize > 1) ClusterSync();
}

// Until barriers are there: in a cluster, others arrive at them, too.
template <typename Config>
__device__ __forceinline__ void WaitForBarriers() {
  if constexpr (Config::kClusterSize == 1) {
    __syncthreads();
  } else {
    ClusterSync();
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_PIPELINE_CUH_
