// The Hopper forward kernel: one CTA finishes one (query tile, head) at a time, over all slices
// that touch it; in the last round, it may process a part of the tile's keys (key_parts.h).
//
// A planner warp fetches tiles, one ahead, and loads their queries. A producer warp iterates over a
// tile's slices and streams key tiles ("blocks") through a ring in shared memory, each with the
// slice that masks it. Consumer warpgroups hold 64 query rows each, and know nothing of slices.
// CTAs share only a work counter, the loads of keys and values in a cluster, and parts, which are
// reduced in a fixed order: the result is deterministic.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_KERNEL_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_KERNEL_CUH_

#include "cc/cuda/attention/forward_epilogue.cuh"
#include "cc/cuda/attention/online_softmax.cuh"
#include "cc/cuda/attention/sm90/forward_block_terms.cuh"
#include "cc/cuda/attention/sm90/forward_planner.cuh"
#include "cc/cuda/attention/sm90/forward_producer.cuh"
#include "cc/cuda/attention/sm90/forward_tile.cuh"
#include "cc/cuda/attention/sm90/wgmma.cuh"

namespace jax_magi::cuda::sm90 {

// A thread's index in its warpgroup, which takes no register.
struct RereadIndex {
  __device__ __forceinline__ RereadIndex(int) {}
  __device__ __forceinline__ operator int() const { return RereadThreadIndex() % kWarpgroup; }
};

// --- Consumer: a warpgroup with 64 rows ---

template <typename Config>
struct Consumer {
  using Element = typename Config::Element;
  using Shared = ForwardShared<Config>;
  static constexpr int kBlockN = Config::kBlockN;

  const ForwardParamsOf<Config>& params;
  Shared& shared;
  int warpgroup;  // Index of the consumer warpgroup.
  // Index in the warpgroup.
  std::conditional_t<Config::kHasTerms, RereadIndex, int> thread;
  SoftmaxScale scale;
  RingPosition<Config::kKStages> k_ring;
  RingPosition<Config::kVStages> v_ring;
  RingPosition<Config::kQStages> q_ring;
  RingPosition<Config::kBiasStages> bias_ring;  // For bias blocks; a bias by key uses k_ring.

  uint32_t q[Config::kQInRegisters ? Config::kHeadDim / 4 : 1];
  float scores[kBlockN / 2];
  uint32_t p[kBlockN / 4];
  float acc[Config::kValueDim / 2];
  RowState state;
  // The sinks of the rows' heads, loaded with a tile's last block; or the rows' lse of earlier
  // calls.
  float sinks[2];
  LogitScale logit;  // The scale of the block, with terms.
  uint32_t bias[Config::kBiasAhead > 0 ? Config::kBiasAhead : 1][4];  // Bias that is read ahead.

  __device__ __forceinline__ void Run() {
    if constexpr (Config::kHasTerms) {
      scale = params.terms.scale;
    } else if constexpr (Config::kHasSoftcap) {
      scale = {params.softcap * kLog2E, params.softmax_scale / params.softcap};
    } else {
      scale = {params.softmax_scale * kLog2E, 0.0f};
    }
    while (true) {
      Wait(&shared.q_full[q_ring.stage], q_ring.phase);
      if constexpr (Config::kHasTerms) {
        // No registers are free for the tile through the loop: it stays in shared memory.
        const TermsTileInfo& tile = shared.tile[TileSlot<Config>(q_ring)];
        if (tile.num_blocks < 0) return;
        Compute(tile);
        if (tile.num_rows > 0 && IsWhole(tile)) Epilogue().Store(tile);
      } else {
        const TileInfo tile = shared.tile[q_ring.stage];
        if (tile.num_blocks < 0) return;
        Compute(tile);
        if (tile.num_rows > 0 && IsWhole(tile) && !IsKept(tile)) Epilogue().Store(tile);
      }
    }
  }

  // This thread's row `r`, 0 or 1, in shared memory; if heads are packed, rows interleave them.
  __device__ __forceinline__ int PackedRow(int r) const {
    return warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
  }

  __device__ __forceinline__ static int Log2PackOf(const TileInfo& tile) {
    return Config::kHasTerms ? 0 : tile.log2_pack;
  }

  __device__ __forceinline__ void ReleaseQueries() {
    Arrive(&shared.q_empty[q_ring.stage]);
    q_ring.Advance();
  }

  __device__ __forceinline__ void Compute(const TileInfoOf<Config>& tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.reference[r] = kNoReference;
      state.max[r] = -INFINITY;
      state.sum[r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) acc[i] = 0.0f;
    if (tile.num_blocks == 0) {
      Epilogue().LoadSinks(tile);
      return ReleaseQueries();
    }
    if constexpr (Config::kQueriesByValues) {
      Wait(&shared.v_full[v_ring.stage], v_ring.phase);
      LoadQueries(shared.v[v_ring.stage]);
      ArriveByWarpAtAll<Config::kClusterSize, /*kIsOrdered=*/true>(&shared.v_empty[v_ring.stage],
                                                                   thread);
      v_ring.Advance();
      ReleaseQueries();
    } else if constexpr (Config::kQInRegisters) {
      LoadQueries(shared.q[q_ring.stage]);
      ReleaseQueries();
    }

    float correction[2];
    WaitForKeys();
    IssueScores();
    int flags = BlockFlags();
    if constexpr (Config::kBiasAhead > 0) Terms().ReadAhead();
    WaitWgmma<0>();
    FinishScores(tile, flags);
    Softmax(correction);
    PackProbabilities<Element>(scores, p);

    // The next block's scores are computed along with the product of this block's probabilities and
    // values, and the next block's softmax overlaps with that product.
    if (!(flags & kLast)) WaitForKeys();
    while (!(flags & kLast)) {
      IssueScores();
      flags = BlockFlags();
      Wait(&shared.v_full[v_ring.stage], v_ring.phase);
      IssueValues();
      if constexpr (Config::kBiasAhead > 0) Terms().ReadAhead();
      WaitWgmma<1>();
      FinishScores(tile, flags);
      // Tested before the softmax, because the result takes a while; and the branch after the
      // softmax keeps ptxas from moving the softmax behind the wait for the product.
      const bool has_keys = (flags & kLast) || IsDone(&shared.k_full[k_ring.stage], k_ring.phase);
      const bool has_moved = Softmax(correction);
      if (!has_keys) WaitForKeys();
      WaitWgmma<0>();
      FinishValues();
      if (has_moved) Rescale(correction);
      PackProbabilities<Element>(scores, p);
    }
    if constexpr (!Config::kQInRegisters) ReleaseQueries();
    Wait(&shared.v_full[v_ring.stage], v_ring.phase);
    IssueValues();
    Epilogue().LoadSinks(tile);
    WaitWgmma<0>();
    FinishValues();
  }

  // Loads queries in wgmma's operand layout: 16 rows of the warp, 16 dims per step.
  __device__ __forceinline__ void LoadQueries(const Element* source) {
    const int row = warpgroup * 64 + thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
      const int chunk = 2 * (step % 4) + thread % 32 / 16;
      const Element* panel = source + step / 4 * Config::kBlockM * 64;
      LoadMatrices(panel + row * 64 + (chunk ^ (row % 8)) * 8, q + 4 * step);
    }
  }

  __device__ __forceinline__ void WaitForKeys() {
    Wait(&shared.k_full[k_ring.stage], k_ring.phase);
  }

  __device__ __forceinline__ void IssueScores() {
    constexpr uint32_t kPanel = 64 * sizeof(Element);
    FenceRegisters(scores);
    FenceWgmma();
    const AlongOperand<Config::kClusterSize> keys(shared.k[k_ring.stage], kBlockN * kPanel);
    if constexpr (Config::kQInRegisters) {
      Multiply<Element, kBlockN, Config::kHeadDim>(q, keys, scores);
    } else {
      const AlongOperand<Config::kClusterSize> queries(shared.q[q_ring.stage] + warpgroup * 64 * 64,
                                                       Config::kBlockM * kPanel);
      Multiply<Element, kBlockN, Config::kHeadDim>(queries, keys, scores);
    }
    CommitWgmma();
  }

  __device__ __forceinline__ void IssueValues() {
    FenceRegisters(acc);
    FenceWgmma();
    const AcrossOperand<Config::kClusterSize> values(shared.v[v_ring.stage],
                                                     kBlockN * 64 * sizeof(Element));
    Multiply<Element, Config::kValueDim, kBlockN, Product::kIsAdded>(p, values, acc);
    CommitWgmma();
  }

  __device__ __forceinline__ int BlockFlags() const {
    return LoadByWarp(shared.block[k_ring.stage].flags);
  }

  // Called when scores are complete: applies the mask, and releases the keys.
  __device__ __forceinline__ void FinishScores(const TileInfoOf<Config>& tile, int flags) {
    FenceRegisters(scores);
    bool is_early = false;
    if constexpr (Config::kHasBiasBlocks) {
      is_early = !(flags & kMasked) && !Terms().NeedsBegin();
      if (is_early) ReleaseKeys();
    }
    if constexpr (Config::kHasTerms) Terms().Add(tile);
    if (flags & kMasked) {
      const BlockInfo info = LoadByWarp(shared.block[k_ring.stage]);
      const int rows[2] = {tile.begin + (PackedRow(0) >> Log2PackOf(tile)),
                           tile.begin + (PackedRow(1) >> Log2PackOf(tile))};
      HideScores(info.slice, rows, info.begin + 2 * (thread % 4), scores);
    }
    if (!is_early) ReleaseKeys();
    k_ring.Advance();
  }

  __device__ __forceinline__ void ReleaseKeys() {
    ArriveByWarpAtAll<Config::kClusterSize>(&shared.k_empty[k_ring.stage], thread);
  }

  __device__ __forceinline__ bool Softmax(float (&correction)[2]) {
    if constexpr (Config::kIsBiasAlone) {
      return OnlineSoftmax</*kHasSoftcap=*/false>(scale, state, scores, correction);
    } else if constexpr (Config::kHasTerms) {
      constexpr bool kMayHaveCap = !Config::kAreSlopesAlone;
      return OnlineSoftmaxOfLogits<kMayHaveCap>(scale, logit, state, scores, correction);
    } else {
      return OnlineSoftmax<Config::kHasSoftcap>(scale, state, scores, correction);
    }
  }

  __device__ __forceinline__ ForwardBlockTerms<Config, Consumer> Terms() { return {*this}; }

  __device__ __forceinline__ void FinishValues() {
    FenceRegisters(acc);
    ArriveByWarpAtAll<Config::kClusterSize>(&shared.v_empty[v_ring.stage], thread);
    v_ring.Advance();
  }

  __device__ __forceinline__ void Rescale(const float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) acc[i] *= correction[i / 2 % 2];
  }

  // Whether the accumulator has all of the tile's sums. For a part, reduces the parts if this is
  // the last one.
  __device__ __forceinline__ bool IsWhole(const TileInfo& tile) {
    if constexpr (!Config::kCutsKeys) return true;
    // Shuffles here and below: with branches that may diverge within a warp, ptxas schedules the
    // main loop badly.
    const int part = __shfl_sync(~0u, tile.part, 0);
    if (part == 0) return true;
    WaitForPreviousKernel();  // The previous kernel resets the counters, and may use the workspace.
    const PartJoiner<Config> joiner{params.parts, part, warpgroup, thread};
    if (__shfl_sync(~0u, joiner.Leave(acc, state), 0) == 0) return false;
    joiner.Join(acc, state);
    return true;
  }

  // Whether earlier results stay unchanged, because no row sees a key of this call.
  __device__ __forceinline__ bool IsKept(const TileInfo& tile) {
    if constexpr (!ForwardEpilogue<Config, Consumer>::kMayMerge) return false;
    const bool keeps = params.keeps_rows || (params.running_out != nullptr && !params.is_rounded);
    return keeps && tile.num_blocks == 0 && tile.part == 0;
  }

  __device__ __forceinline__ ForwardEpilogue<Config, Consumer> Epilogue() { return {*this}; }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    ForwardKernel(const __grid_constant__ ForwardParamsOf<Config> params) {
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<ForwardShared<Config>*>(memory);
  const int thread = threadIdx.x;
  if (thread == 0) {
    PrefetchTensorMap(&params.q_map[0]);
    PrefetchTensorMap(&params.k_map);
    PrefetchTensorMap(&params.v_map);
    constexpr int kConsumers = Config::kNumConsumers * kWarpgroup;
    InitRing(shared.q_full, shared.q_empty, 1, kConsumers);
    // Keys and values are loaded by all CTAs of the cluster, and released to all of them.
    InitRing(shared.k_full, shared.k_empty, 1, Config::kClusterSize * kConsumers / 32);
    InitRing(shared.v_full, shared.v_empty, 1, Config::kClusterSize * kConsumers / 32);
    if constexpr (Config::kHasTerms) {
      const bool by_lanes = !Config::kHasBiasBlocks && !KeyBiasIsCopied(params);
      InitRing(shared.bias_full, shared.bias_empty, by_lanes ? 32 : 1,
               Config::kHasBiasBlocks ? kConsumers / 32 : kConsumers);
    }
    shared.work.Init();
    InitBarrier(&shared.planned_full, 32);
    InitBarrier(&shared.planned_empty, 32);
    FenceBarrierInit();
  }
  WaitForBarriers<Config>();

  if (thread < kWarpgroup) {
    GiveRegisters<Config::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, thread / 32, 0);
    if (warp == 0) {
      Producer<Config>{params, shared, thread}.Run();
      WaitForClusterToEnd<Config>();
    } else if (warp == 1) {
      Planner<Config>{params, shared, thread % 32}.Run();
      WaitForClusterToEnd<Config>();
    }
  } else {
    TakeRegisters<Config::kConsumerRegisters>();
    // The shuffle tells the compiler that the value is uniform in a warp.
    const int warpgroup = __shfl_sync(~0u, thread / kWarpgroup - 1, 0);
    Consumer<Config> consumer{params, shared, warpgroup, thread % kWarpgroup};
    consumer.Run();
    WaitForClusterToEnd<Config>();
  }
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_KERNEL_CUH_
