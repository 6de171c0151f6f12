// The Hopper backward kernel: one CTA processes one tile of rows at a time.
//
// With scores S, P = exp(S - lse) and dP = dout V^T, the gradients are
//
//   dS = P * (dP - delta),   dV = P^T dout,   dK = scale * dS^T Q,   dQ = scale * dS K
//
// (If dQ is accumulated in memory, it leaves the kernel unscaled: the later cast applies the
// scale.)
//
// Rows are keys: a tile of k and v stays in shared memory, while q and dout stream past it in
// column blocks, for all query heads of the kv head. Scores are computed transposed, [keys,
// queries], so that P^T and dS^T are in registers in the layout that the products for dV and dK
// need; dS goes through shared memory to the product for dQ, whose tiles are added to memory by
// other warps, with TMA.
//
// The order of those additions is not fixed, unless results must be bitwise reproducible: see
// dq_order.h.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_KERNEL_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_KERNEL_CUH_

#include "cc/cuda/attention/sm90/backward_consumer.cuh"
#include "cc/cuda/attention/sm90/backward_producer.cuh"
#include "cc/cuda/attention/sm90/backward_roles.cuh"
#include "cc/cuda/attention/sm90/dq_adder.cuh"
#include "cc/cuda/attention/sm90/hopper.cuh"

namespace jax_magi::cuda::sm90 {

// All consumers write zeros for hidden pairs, as long as there are any left.
template <typename Config>
__device__ __forceinline__ void WriteZeros(const BackwardParamsOf<Config>& params,
                                           BackwardShared<Config>& shared) {
  WaitForPreviousKernel();  // The previous kernel resets the counter.
  constexpr int kThreads = Config::kNumConsumers * kWarpgroup;
  const auto sync = [] {
    __syncwarp();  // A warp must arrive at a named barrier as one.
    NamedSync(kZeros, kThreads);
  };
  ZeroAllHidden<kThreads>(params.gradients.hidden, &params.work.counter->next_hidden,
                          threadIdx.x - kWarpgroup, shared.hidden, sync, shared.column_x[0]);
}

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    BackwardKernel(const __grid_constant__ BackwardParamsOf<Config> params) {
  extern __shared__ char memory[];
  constexpr int kClusterSize = Config::kClusterSize;
  // A constant address instead of a pointer tells ptxas that addresses are the same for all
  // threads.
  auto& shared = *static_cast<BackwardShared<Config>*>(DynamicShared<kClusterSize>());
  const int thread = threadIdx.x;
  if (thread == 0 && DynamicShared<kClusterSize>() != memory) __trap();
  // Otherwise the compiler merges both conditions, and the consumers' loop starts at another place
  // in a line of the instruction cache. In a cluster, this would take more instructions.
  if constexpr (kClusterSize == 1) asm volatile("" ::: "memory");
  if (thread == 0) {
    constexpr int kConsumers = Config::kNumConsumers * kWarpgroup;
    InitRing(shared.row_full, shared.row_empty, 1, kConsumers);
    InitBarrier(&shared.row_y_empty, kConsumers);
    // Columns are loaded by all CTAs of a cluster, and released to all of them.
    constexpr int kWarps = kConsumers / 32, kOtherWarps = (kClusterSize - 1) * kWarps;
    InitRing(shared.x_full, shared.x_empty, 1, kConsumers + kOtherWarps);
    InitRing(shared.y_full, shared.y_empty, 1, kWarps + kOtherWarps);
    if constexpr (kClusterSize > 1) shared.work.Init();
    InitRing(shared.dq_full, shared.dq_empty, kWarpgroup / 32, 1);
    // With roles, all threads arrive: each has read factors that the other warpgroup overwrites.
    constexpr int kDsArrivals = Config::kHasRoles ? kConsumers : kConsumers / 32;
    for (uint64_t& barrier : shared.ds_full) InitBarrier(&barrier, kDsArrivals);
    if constexpr (Config::kHasRoles) {
      for (uint64_t& barrier : shared.factors_full) InitBarrier(&barrier, kWarpgroup);
    }
    if constexpr (Config::kBiasByTma) {
      const bool is_stored = !Config::kDqIsLate || params.gradients.dbias != nullptr;
      InitRing(shared.bias_full, shared.ds_empty, 1, kConsumers / 32 + 32 * is_stored);
    }
    if constexpr (Config::kZeroShare > 0) {
      // Slices may be read immediately: the previous kernel has waited for everything before it.
      // All CTAs must reach the same result, because it determines which CTA begins with which
      // work.
      const HiddenPairs& hidden = params.gradients.hidden;
      shared.has_hidden = hidden.dbias != nullptr && !IsNothingHidden(hidden);
      shared.num_workers = gridDim.x - (shared.has_hidden ? gridDim.x / Config::kZeroShare : 0);
    }
    FenceBarrierInit();
  }
  WaitForBarriers<Config>();

  if (thread < kWarpgroup) {
    GiveRegisters<Config::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, thread / 32, 0);
    if (warp == 0) {
      BackwardProducer<Config>{params, shared, thread % 32}.Run();
      WaitForClusterToEnd<Config>();
    } else if (warp < 3) {
      DqAdder<Config>{params, shared, warp - 1, thread % 32}.Run();
    }
    if constexpr (Config::kStoresDs) {
      if (warp == 3) {
        DsStore<Config, BackwardTermsParams, BackwardShared<Config>>{params, shared}.Run(
            kDsWritten);
      }
    }
  } else {
    TakeRegisters<Config::kConsumerRegisters>();
    // The shuffle tells the compiler that the value is uniform in a warp.
    const int warpgroup = __shfl_sync(~0u, thread / kWarpgroup - 1, 0);
    using Consumer =
        std::conditional_t<Config::kHasRoles, BackwardRoles<Config>, BackwardConsumer<Config>>;
    Consumer consumer{params, shared, warpgroup, thread % kWarpgroup};
    if constexpr (Config::kZeroShare > 0) {
      if (blockIdx.x >= shared.num_workers) {
        WriteZeros<Config>(params, shared);
        NamedArrive(kZerosWritten, kZerosWrittenThreads);
      }
    }
    consumer.Run();
    WaitForClusterToEnd<Config>();
    if constexpr (Config::kZeroShare > 0) {
      if (shared.has_hidden) WriteZeros<Config>(params, shared);
    }
  }
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_KERNEL_CUH_
