// The backward kernel for sm_80 and later: one CTA processes one tile of keys at a time.
//
// With scores S, P = exp(S - lse) and dP = dout V^T, the gradients are
//
//   dS = P * (dP - delta),   dV = P^T dout,   dK = scale * dS^T Q,   dQ = scale * dS K
//
// Keys and values of a tile stay in shared memory, while blocks of queries and dout stream past
// them, for all query heads of the kv head. Scores are computed transposed, [keys, queries], so
// that P^T and dS^T are in registers as the products for dV and dK need them. dS also goes through
// shared memory to the product for dQ, which each thread adds to a float32 sum in memory. dQ is
// unscaled: a later kernel applies the scale.
//
// With 256 dims, warps have one of two roles: see backward_roles.cuh.
//
// The order of those additions is not fixed, unless results must be bitwise reproducible: see
// dq_order.h.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_KERNEL_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_KERNEL_CUH_

#include "cc/cuda/attention/sm80/backward_block.cuh"
#include "cc/cuda/attention/sm80/backward_dq.cuh"
#include "cc/cuda/attention/sm80/backward_loads.cuh"
#include "cc/cuda/attention/sm80/backward_roles.cuh"

namespace jax_magi::cuda::sm80 {

// All blocks of a tile, where warps have no roles. Stages of shared memory are those of the block's
// number in the tile.
template <typename Config>
struct BackwardLoop {
  using Block = BackwardBlock<Config>;
  static constexpr bool kQIsEarly = Config::kQStages == 2, kDoIsEarly = Config::kDoStages == 2;
  const BackwardParamsOf<Config>& params;
  BackwardShared<Config>& shared;
  Block& block;
  BackwardLoads<Config> loads;

  __device__ __forceinline__ const BlockInfo& Info(uint32_t n) const { return shared.block[n % 4]; }
  __device__ __forceinline__ static int QStage(uint32_t n) { return Anew(n) % Config::kQStages; }
  __device__ __forceinline__ static int DoStage(uint32_t n) { return Anew(n) % Config::kDoStages; }
  __device__ __forceinline__ static int DsStage(uint32_t n) { return Anew(n) % Config::kDsStages; }

  // A copy, so that addresses derived from it are computed again at each use.
  __device__ __forceinline__ static uint32_t Anew(uint32_t n) {
    asm volatile("" : "+r"(n));
    return n;
  }

  // advance(info) sets the block after the next one; one warp does so.
  template <typename Advance>
  __device__ __forceinline__ void Run(Advance advance) {
    if (Info(0).head < 0) return;
    loads.K();
    loads.V();
    if constexpr (Config::kRegisterDims > 0) {
      static_assert(!kDoIsEarly, "the memory for dO is free until the first barrier of the loop");
      loads.LastValues();
      CommitCopies();
      WaitForGroups<0>();
      __syncthreads();
      block.LoadValues({SharedAddress(shared.dout[0])});
    }
    LoadEarly(0);
    CommitCopies();
    // The dQ of a block may come an iteration later, so there is one iteration more.
    for (uint32_t n = 0;; ++n) {
      WaitForGroups<0>();
      // What was copied for this block and written for the one before can be read, and what the one
      // before has read can be overwritten.
      __syncthreads();
      const bool has_block = Info(n).head >= 0;
      if (has_block) {
        if constexpr (!kQIsEarly) {
          loads.Q(Info(n), 0);
          CommitCopies();
        }
        if constexpr (!kDoIsEarly) {
          loads.Do(Info(n), 0);
          CommitCopies();
        }
        if (Info(n + 1).head >= 0) LoadEarly(n + 1);
        CommitCopies();
        advance(shared.block[(n + 2) % 4]);
      }
      if (Config::kDqIsLate && n > 0) AddDq(n - 1);
      if (!has_block) break;
      if constexpr (!kQIsEarly) {
        WaitForGroups<1 + !kDoIsEarly>();
        __syncthreads();
      }
      if constexpr (Config::kSplit == 1) {
        Compute(n);
      } else {
        ComputeShare(n);
      }
      if constexpr (!Config::kDqIsLate) {
        __syncthreads();  // dS is complete.
        AddDq(n);
      }
    }
  }

 private:
  __device__ __forceinline__ void AddDq(uint32_t n) const {
    BackwardDq<Config>{params, shared}.Add(Info(n), DsStage(n));
  }

  // Copies as much of a block as has two stages.
  __device__ __forceinline__ void LoadEarly(uint32_t n) const {
    if constexpr (kQIsEarly) loads.Q(Info(n), QStage(n));
    if constexpr (kDoIsEarly) loads.Do(Info(n), DoStage(n));
  }

  __device__ __forceinline__ void WaitForDo() const {
    if constexpr (!kDoIsEarly) {
      WaitForGroups<1>();
      __syncthreads();
    }
  }

  // The products of a warp that has its keys alone: all queries, one chunk after another.
  __device__ __forceinline__ void Compute(uint32_t n) {
#pragma unroll
    for (int i = 0; i < Config::kOwnChunks; ++i) {
      block.Probabilities(Info(n), QStage(n), i);
      if (i == 0) WaitForDo();
      block.ScoreGradients(Info(n), QStage(n), DoStage(n), i);
      block.Renew();
      block.Write(DsStage(n), block.ds, i);
      block.MultiplyOwn(block.p, block.DoTile(DoStage(n)), block.dv, i);
      block.Renew();
      block.MultiplyOwn(block.ds, block.QTile(QStage(n)), block.dk, i);
    }
  }

  // Those of a warp that shares its keys: one chunk of the queries, then a share of the dims for
  // all queries.
  __device__ __forceinline__ void ComputeShare(uint32_t n) {
    block.Probabilities(Info(n), QStage(n));
    block.Write(DsStage(n), block.p);
    WaitForDo();
    block.ScoreGradients(Info(n), QStage(n), DoStage(n));
    block.Renew();
    block.MultiplyOwn(block.p, block.DoTile(DoStage(n)), block.dv);
    block.SyncGroup();  // Probabilities are complete, and sums by key.
    if constexpr (Config::kHasTerms) block.AddKeySums(Info(n));
    block.MultiplyOthers(DsStage(n), block.DoTile(DoStage(n)), block.dv);
    block.SyncGroup();  // They have been read.
    block.Renew();
    block.Write(DsStage(n), block.ds);
    if constexpr (Config::kHasTerms) block.StoreBiasGradient(Info(n), DsStage(n));
    block.MultiplyOwn(block.ds, block.QTile(QStage(n)), block.dk);
    block.SyncGroup();  // The group's dS is complete.
    block.MultiplyOthers(DsStage(n), block.QTile(QStage(n)), block.dk);
  }
};

// The number of CTAs whose first work is their own index. If work is ordered there are none: a CTA
// that has not started yet must not own work that others wait for.
__device__ __forceinline__ uint32_t NumAssigned(const BackwardParams& params) {
  return params.dq_order.is_fixed() ? 0 : gridDim.x;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    BackwardKernel(const __grid_constant__ BackwardParamsOf<Config> params) {
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<BackwardShared<Config>*>(memory);
  using Block = std::conditional_t<Config::kHasRoles, RoleBlock<Config>, BackwardBlock<Config>>;
  using Loop = std::conditional_t<Config::kHasRoles, RoleLoop<Config>, BackwardLoop<Config>>;
  Block block{params, shared};
  const auto next = [&] {
    return NumAssigned(params) + atomicAdd(&params.work.counter->next_work, 1);
  };
  // Called by all threads, for the first warp.
  const auto advance = [&](BlockInfo& info) {
    const int thread = ThreadAnew();
    if (thread < 32) shared.walk.Advance(params.work, params.walk, thread, info, next);
  };

  if (threadIdx.x == 0) shared.walk.number = NumAssigned(params) > 0 ? blockIdx.x : next();
  for (;;) {
    if (const int thread = ThreadAnew(); thread < 32) {
      __syncwarp();
      shared.walk.Start(params.work, params.walk, thread, next);
      __syncwarp();
      if (shared.walk.has_tile) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) advance(shared.block[i]);
      }
    }
    __syncthreads();
    if (!shared.walk.has_tile) break;
    block.ClearGradients();
    Loop{params, shared, block, {params, shared}}.Run(advance);
    block.StoreGradients();
    __syncthreads();  // All threads have read the tile.
  }
}

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_KERNEL_CUH_
