// The backward kernel's consumers if the two warpgroups share the same 64 keys, and have roles: the
// first one computes scores, probabilities and dV, the second one dP, dS and dK. Gradients then
// take half as many registers per thread as if each warpgroup held both, and scores and dP are
// computed only once.
//
//   first    S = K Q^T,   P = exp(S - lse), passed to the second,   dQ,   dV += P dO
//   second   dP = V dO^T,   dS = P * (dP - delta),   dQ,   dK += dS Q
//
// (S, P, dP and dS are transposed here.) For dQ, each warpgroup multiplies dS by half of the dims
// of K. That dQ is of the previous block, whose dS was written long before. It is copied from
// registers during the product for dV or dK, in two steps if shared memory has room for only half
// of it.
//
// With terms, the first warpgroup adds them to scores, and the second one stores their gradients.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_ROLES_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_ROLES_CUH_

#include "cc/cuda/attention/sm90/backward_roles_terms.cuh"
#include "cc/cuda/attention/sm90/backward_warpgroup.cuh"

namespace jax_magi::cuda::sm90 {

template <typename Config>
struct BackwardRoles : BackwardWarpgroup<Config> {
  using Base = BackwardWarpgroup<Config>;
  using Base::Base, Base::params, Base::shared, Base::warpgroup, Base::thread, Base::block;
  using Base::Ds, Base::EndDq, Base::Scale, Base::WaitForY, Base::YStage;
  static_assert(Config::kXStages == 2 && Config::kDsStages == 2 && Config::kDqSteps <= 2,
                "positions follow from the number of blocks");
  static constexpr bool kHasSteps = Config::kDqSteps == 2;
  static constexpr uint32_t kFirst = 1u << 31;  // Marks the tile's first block in num_done.

  uint32_t num_done = 0;  // Number of blocks: the position in all rings.

  __device__ __forceinline__ void Run() {
    block.scale = Scale();
    if (warpgroup == 0) {
      ForEachTile(
          block.dy, [&] { return ComputeScores(); },
          [&](const RowTileInfo& tile) { block.StoreDy(tile); });
    } else {
      ForEachTile(
          block.dx, [&] { return ComputeGradients(); },
          [&](const RowTileInfo& tile) { block.StoreDx(tile); });
    }
    EndDq(num_done, kHasSteps ? 0 : num_done % 2);
  }

  // Calls compute() for each tile with blocks, then store(tile). `acc` is what compute() adds to.
  template <int kCount, typename ComputeFun, typename StoreFun>
  __device__ __forceinline__ void ForEachTile(float (&acc)[kCount], ComputeFun compute,
                                              StoreFun store) {
    for (uint32_t phase = 0;;) {
      Wait(&shared.row_full[0], phase);
      // The shuffle tells the compiler that the loop is uniform in a warp, so that descriptors are
      // not computed in each thread.
      const int num_blocks = LoadByWarp(shared.tile[0].num_blocks);
      if (num_blocks < 0) break;
#pragma unroll
      for (float& x : acc) x = 0.0f;
      if (num_blocks > 0) compute();
      const RowTileInfo tile = shared.tile[0];
      // The phase is read from shared memory, as no register is free through compute().
      phase = LoadByWarp(shared.tile[0].next_phase);
      Arrive(&shared.row_empty[0]);
      store(tile);
    }
  }

  // The role of the first warpgroup.
  __device__ __forceinline__ void ComputeScores() {
    num_done |= kFirst;
    for (bool is_last = false; !is_last;) {
      // The shuffle tells the compiler that the value is uniform in a warp.
      num_done = __shfl_sync(~0u, num_done, 0);
      const int parity = num_done % 2;
      Wait(&shared.x_full[parity], num_done / 2 % 2);
      BackwardRolesTerms<Config> terms{block};
      if constexpr (Config::kHasTerms) terms.Read(parity);
      block.IssueScores(parity);
      if constexpr (kHasSteps) SetDqTarget(parity);
      block.ReadStarts(parity);
      const int flags = BlockFlags(parity);
      is_last = flags & kLast;
      WaitWgmma<0>();
      FenceRegisters(block.scores);
      if constexpr (Config::kHasTerms) terms.Add(parity);
      if (flags & kMasked) block.Hide(shared.block[parity]);
      GiveFactors(parity);
      if constexpr (kHasSteps) Arrive(&shared.x_empty[parity]);
      WaitForDs(num_done - 1);
      // In the first block this is a product of stale data, and is not used: with a branch, ptxas
      // would serialize all products.
      block.IssueDqByQuery(Ds(parity ^ 1));
      WaitForY(num_done);
      block.IssueDy(YStage(num_done));
      AddDqBefore(parity);
      if constexpr (!kHasSteps) {
        SetDqTarget(parity);
        Arrive(&shared.x_empty[parity]);
      }
      WaitWgmma<0>();
      FenceRegisters(block.dy);
      ArriveByWarp(&shared.y_empty[YStage(num_done)], thread);
      num_done = (num_done & ~kFirst) + 1;
    }
    AddLastDq();
  }

  // The role of the second warpgroup.
  __device__ __forceinline__ void ComputeGradients() {
    num_done |= kFirst;
    for (bool is_last = false; !is_last;) {
      // The shuffle tells the compiler that the value is uniform in a warp.
      num_done = __shfl_sync(~0u, num_done, 0);
      const int parity = num_done % 2;
      Wait(&shared.x_full[parity], num_done / 2 % 2);  // Statistics are needed.
      block.ReadDeltas(parity);
      WaitForY(num_done);
      block.IssueDp(YStage(num_done));
      if constexpr (kHasSteps) SetDqTarget(parity);
      is_last = BlockFlags(parity) & kLast;
      WaitWgmma<0>();
      FenceRegisters(block.dp);
      ArriveByWarp(&shared.y_empty[YStage(num_done)], thread);
      TakeFactors(parity);
      block.ScoreGradients();
      if constexpr (Config::kHasTerms) BackwardBlockTerms<Config>{block}.AddGradients(parity);
      WaitForDs(num_done - 1);
      block.WriteDs(Ds(parity));
      FenceAsyncProxy();
      block.IssueDqByQuery(Ds(parity ^ 1));  // Not used in the first block, as above.
      block.IssueDx(parity);
      AddDqBefore(parity);
      if constexpr (!kHasSteps) SetDqTarget(parity);
      if constexpr (Config::kHasTerms)
        BackwardRolesTerms<Config>{block}.StoreDs(parity, Ds(parity));
      WaitWgmma<0>();
      FenceRegisters(block.dx);
      Arrive(&shared.x_empty[parity]);
      num_done = (num_done & ~kFirst) + 1;
    }
    AddLastDq();
  }

  __device__ __forceinline__ int BlockFlags(int stage) const {
    return LoadByWarp(shared.block[stage].flags);
  }

  // Waits until the dS of the block before this one, given by its number, is written, and both
  // warpgroups have read that of the block before it. Blocks are counted over all tiles; before the
  // first block there is nothing to wait for.
  __device__ __forceinline__ void WaitForDs(uint32_t number) {
    Wait(&shared.ds_full[number % 2], number / 2 % 2);
  }

  // --- The factors of dP, from one warpgroup to the other ---

  // Threads write and read words here, so all of them arrive at the barriers that order these:
  // factors_full, and ds_full, after which the other warpgroup may overwrite the factors.

  // The factors of the block before the previous one may be overwritten: they were read before that
  // block's dS was written, which has been waited for.
  __device__ __forceinline__ void GiveFactors(int stage) {
    if (Config::kHasSoftcap || (Config::kHasTerms && block.scale.inverse_cap != 0.0f)) {
      block.CappedFactors(stage, Factors(stage));
    } else {
      block.Probabilities(stage);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        Factors(stage)[i * kWarpgroup] =
            make_uint4(block.p[4 * i], block.p[4 * i + 1], block.p[4 * i + 2], block.p[4 * i + 3]);
      }
    }
    Arrive(&shared.factors_full[stage]);
  }

  __device__ __forceinline__ void TakeFactors(int stage) {
    Wait(&shared.factors_full[stage], num_done / 2 % 2);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 four = Factors(stage)[i * kWarpgroup];
      block.p[4 * i] = four.x;
      block.p[4 * i + 1] = four.y;
      block.p[4 * i + 2] = four.z;
      block.p[4 * i + 3] = four.w;
    }
  }

  static constexpr int kVectors = Config::kBlockColumns / 16;
  __device__ __forceinline__ uint4* Factors(int stage) const {
    return &shared.factors[stage][0][thread];
  }

  // --- dQ: from registers to shared memory, from where DqAdder takes it ---

  // Sets where the dQ of this block is added. With two steps, the second step of the block before
  // the previous one has been written, so the first one, with which DqAdder reads the slot, has
  // been taken. With one step, the same holds once the previous block's dQ has been written.
  __device__ __forceinline__ void SetDqTarget(int parity) { Base::SetDqTarget(parity, parity); }

  // Adds the dQ of the previous block when its product, the first of two in flight, is complete.
  __device__ __forceinline__ void AddDqBefore(int parity) {
    WaitWgmma<1>();
    FenceRegisters(block.dq);
    // The other warpgroup may now overwrite the previous dS, or the factors of the one before it.
    Arrive(&shared.ds_full[parity]);
    if (!(num_done & kFirst)) AddDq(parity ^ 1);
  }
  // Adds the dQ of a tile's last block.
  __device__ __forceinline__ void AddLastDq() {
    // Otherwise the compiler keeps phases of the last block, and with a cap there is no register
    // for it.
    asm volatile("" : "+r"(num_done));
    WaitForDs(num_done - 1);
    const int parity = (num_done - 1) % 2;
    block.IssueDqByQuery(Ds(parity));
    WaitWgmma<0>();
    FenceRegisters(block.dq);
    AddDq(parity);
  }

  // `parity` is that of the block.
  __device__ __forceinline__ void AddDq(int parity) {
#pragma unroll
    for (int step = 0; step < Config::kDqSteps; ++step) {
      Wait(&shared.dq_empty[warpgroup], (kHasSteps ? step : parity) ^ 1);
      block.StoreDqByQuery(block.dq + step * (Config::kDqRegisters / Config::kDqSteps));
      FenceAsyncProxy();
      ArriveByWarp(&shared.dq_full[warpgroup], thread);
    }
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_ROLES_CUH_
