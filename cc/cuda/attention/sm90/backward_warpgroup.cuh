// What a consumer warpgroup of the backward kernel is, whichever work it does: see
// backward_consumer.cuh and backward_roles.cuh. These have the positions in rings, because ptxas
// allocates registers by the order of members.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_WARPGROUP_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_WARPGROUP_CUH_

#include "cc/cuda/attention/sm90/backward_block.cuh"

namespace jax_magi::cuda::sm90 {

template <typename Config>
struct BackwardWarpgroup {
  using Element = typename Config::Element;

  const BackwardParamsOf<Config>& params;
  BackwardShared<Config>& shared;
  int warpgroup;  // Index of the consumer warpgroup.
  int thread;     // Index in the warpgroup.
  BackwardBlock<Config> block;

  __device__ __forceinline__ BackwardWarpgroup(const BackwardParamsOf<Config>& params,
                                               BackwardShared<Config>& shared, int warpgroup,
                                               int thread)
      : params(params),
        shared(shared),
        warpgroup(warpgroup),
        thread(thread),
        block{params, shared, warpgroup, thread, /*row_stage=*/0} {}

  // The forward kernel has the same lines: if they were a function, ptxas would schedule the end of
  // some of its variants differently.
  __device__ __forceinline__ SoftmaxScale Scale() const {
    if constexpr (Config::kHasTerms) {
      return params.terms.scale;
    } else if constexpr (Config::kHasSoftcap) {
      return {params.softcap * kLog2E, params.softmax_scale / params.softcap};
    } else {
      return {params.softmax_scale * kLog2E, 0.0f};
    }
  }

  // Blocks have numbers over all tiles, which are their positions in rings.
  __device__ __forceinline__ static int YStage(uint32_t number) {
    return number % Config::kYStages;
  }
  __device__ __forceinline__ void WaitForY(uint32_t number) {
    Wait(&shared.y_full[YStage(number)], number / Config::kYStages % 2);
  }

  __device__ __forceinline__ Element* Ds(int stage) const {
    return shared.ds + stage * Config::kBlockRows * Config::kBlockColumns;
  }

  // Sets where the dQ of the block in stage `x_stage` is added. `parity` is that of the block. The
  // slot was last used by the block before the previous one, and must have been read.
  __device__ __forceinline__ void SetDqTarget(int x_stage, int parity) {
    if (thread == 0) shared.dq_target[warpgroup][parity] = shared.target[x_stage];
  }

  // Lets DqAdder end. `number` is that of the block that would be next, and `phase` that of the
  // barriers for its dQ.
  __device__ __forceinline__ void EndDq(uint32_t number, uint32_t phase) {
    Wait(&shared.dq_empty[warpgroup], phase ^ 1);
    if (thread == 0) shared.dq_target[warpgroup][number % 2].head = -1;
    ArriveByWarp(&shared.dq_full[warpgroup], thread);
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_WARPGROUP_CUH_
