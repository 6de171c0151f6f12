// The warps of the backward kernel that add dQ from shared memory to the sum in global memory.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_DQ_ADDER_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_DQ_ADDER_CUH_

#include "cc/cuda/attention/sm90/backward_tile.cuh"

namespace jax_magi::cuda::sm90 {

// One warp that adds what consumer warpgroup `warpgroup` writes to shared memory to dQ.
template <typename Config>
struct DqAdder {
  const BackwardParamsOf<Config>& params;
  BackwardShared<Config>& shared;
  int warpgroup, lane;

  __device__ __forceinline__ void Run() {
    if (!params.dq_order.is_fixed() && lane > 0) return;  // One thread is enough.
    constexpr int kDims = Config::kDqPanelDims;
    constexpr bool kHasSteps = Config::kDqSteps > 1;
    DqTarget target;
    uint32_t parity = 0;  // The parity of the block.
    for (uint32_t phase = 0;; phase ^= 1) {
      Wait(&shared.dq_full[warpgroup], phase);
      // Read in a block's first step only: at the second step, the target may already be another
      // block's.
      if (!kHasSteps || phase == 0) {
        const DqTarget& said = shared.dq_target[warpgroup][kHasSteps ? parity : phase];
        target = params.dq_order.is_fixed() ? LoadByWarp(said) : said;
        if (target.head < 0) break;
        target.query += DqFirstQuery<Config>(warpgroup);
        parity ^= 1;
      }
      const int num_queries = Min(Config::kDqQueries, params.dq_sum_rows - target.query);
      const int panel =
          (target.batch * params.num_q_heads + target.head) * (Config::kHeadDim / kDims) +
          DqPanel<Config>(warpgroup, kHasSteps ? phase : 0);
      int32_t* done = nullptr;  // The counter of this lane's unit.
      if (params.dq_order.is_fixed()) done = WaitForTurn(target, panel, num_queries);
      if (lane == 0) {
        if (num_queries > 0) {
          ReduceAdd(params.dq_sum + (int64_t{panel} * params.dq_sum_rows + target.query) * kDims,
                    shared.dq + warpgroup * Config::kDqQueries * kDims,
                    num_queries * kDims * sizeof(float));
        }
        CommitReduce();
        WaitReduceRead();
        Arrive(&shared.dq_empty[warpgroup]);
      }
      if (params.dq_order.is_fixed()) {
        // Why relaxed counters are sufficient to keep the order:
        // 1. WaitReduce returns when the addition is complete, not just read from shared memory. L2
        //    performs the addition, and all SMs see its result there; no SM keeps a copy.
        // 2. The counter is incremented after that in program order: by this warp, which is
        //    synchronized, and also in L2.
        // 3. The waiting warp reads the counter from L2, and issues its own addition only after a
        //    branch on the value that was read: a reduction is not issued speculatively, and the
        //    "memory" clobber keeps the compiler from moving it.
        // 4. That addition does not carry an older value of the sum: L2 reads the sum when it adds.
        //    An acquire would have nothing to invalidate, and a release nothing to write back.
        if (lane == 0) WaitReduce();
        __syncwarp();
        if (done != nullptr) AddToCounter(done, 1);
        // Both adders have queries of the same panel here, and the tile's next block may have the
        // same queries, through another slice.
        if constexpr (Config::kSplitQueries) NamedSync(kDqAdded, 2 * 32);
      }
    }
    if (lane == 0) WaitReduce();
  }

  // Returns the counter that this lane must increment after the visit, or null if it has no unit.
  __device__ __forceinline__ int32_t* WaitForTurn(const DqTarget& target, int panel,
                                                  int num_queries) {
    const DqOrder& order = params.dq_order;
    const int unit = order.UnitOf(target.query) + lane;
    const bool is_inside = num_queries > 0 && unit <= order.UnitOf(target.query + num_queries - 1);
    int32_t* done = order.done + int64_t{panel} * order.num_units + unit;
    const int packed =
        is_inside ? order.turns[int64_t{target.tile} * order.num_units + unit] : kNotVisited;
    const DqTurn turn = DqTurn::Unpack(packed);
    const auto is_early = [&] { return is_inside && LoadCounter(done) < turn.num_before; };
    // The table and the first part's counter are loaded at the same time.
    bool waits = is_early();
    if (turn.part == 1) {
      done += order.num_counters;
      waits = is_early();
    }
    while (__any_sync(~0u, waits)) waits = is_early();
    return packed != kNotVisited ? done : nullptr;
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_DQ_ADDER_CUH_
