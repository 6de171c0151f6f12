// The backward kernel's consumers: the order in which a warpgroup waits, multiplies and computes.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_CONSUMER_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_CONSUMER_CUH_

#include "cc/cuda/attention/sm90/backward_block_terms.cuh"
#include "cc/cuda/attention/sm90/backward_warpgroup.cuh"

namespace jax_magi::cuda::sm90 {

template <typename Config>
struct BackwardConsumer : BackwardWarpgroup<Config> {
  using Base = BackwardWarpgroup<Config>;
  using Base::Base, Base::params, Base::shared, Base::warpgroup, Base::thread, Base::block;
  using Base::Ds, Base::EndDq, Base::Scale, Base::SetDqTarget, Base::WaitForY, Base::YStage;

  RingPosition<Config::kXStages> x_ring;
  uint32_t num_done = 0;  // Number of blocks: the position in the other rings.

  __device__ __forceinline__ void Run() {
    block.scale = Scale();
    for (uint32_t phase = 0;;) {
      Wait(&shared.row_full[block.RowStage()], phase);
      // The shuffle tells the compiler that the loop is uniform in a warp, so that descriptors are
      // not computed in each thread.
      const int num_blocks = LoadByWarp(block.Tile().num_blocks);
      if (num_blocks < 0) break;
#pragma unroll
      for (float& x : block.dx) x = 0.0f;
#pragma unroll
      for (float& y : block.dy) y = 0.0f;
      if (num_blocks > 0) {
        if constexpr (Config::kRowYInRegisters) block.LoadRowY();
        if constexpr (Config::kRowStages > 1) {
          Arrive(&shared.row_y_empty);
          // The shuffle tells the compiler that the value is uniform in a warp.
          block.row_stage = __shfl_sync(~0u, block.row_stage, 0);
        }
        if constexpr (Config::kInTwoBursts) {
          ComputeInTwoBursts();
        } else if constexpr (Config::kTakesTurns) {
          ComputeInTurns();
        } else {
          Compute();
        }
      } else if constexpr (Config::kRowStages > 1) {
        // Not before the branch, or ptxas would compute descriptors in each thread.
        Arrive(&shared.row_y_empty);
      }
      const RowTileInfo tile = block.Tile();
      // The phase is read from shared memory, as no register is free through Compute().
      phase = LoadByWarp(block.Tile().next_phase);
      Arrive(&shared.row_empty[block.RowStage()]);
      block.row_stage = (block.RowStage() + 1) % Config::kRowStages;
      block.StoreDx(tile);
      block.StoreDy(tile);
    }
    if constexpr (kDsIsByX) {
      // Wait until the ds_info of an older block has been read.
      Wait(&shared.ds_empty[x_ring.stage], x_ring.phase ^ 1);
      if (warpgroup == 0 && thread == 0) shared.ds_info[x_ring.stage].head = -1;
      ArriveByWarp(&shared.ds_full[x_ring.stage], thread);
    } else if constexpr (Config::kStoresDs) {
      if (warpgroup == 0 && thread == 0) shared.ds_info[num_done % 2].head = -1;
      NamedSync(kDsWritten, Config::kDsThreads);
    }
    EndDq(num_done, num_done % 2);
  }

  __device__ __forceinline__ void Compute() {
    static_assert(!Config::kHasTerms, "with terms, products come in two bursts");
    WaitForX();
    block.IssueScores(x_ring.stage);
    block.ReadStatistics(x_ring.stage);
    WaitWgmma<0>();
    // No product may be in flight across iterations, or ptxas would serialize all products.
    for (bool is_last = false; !is_last;) {
      const RingPosition<Config::kXStages> x_before = x_ring;
      // The shuffle tells the compiler that the value is uniform in a warp.
      num_done = __shfl_sync(~0u, num_done, 0);
      const int x_stage = x_ring.stage, y_stage = YStage(num_done);
      const int ds_stage = num_done % 2;
      const int flags = BlockFlags();
      is_last = flags & kLast;
      WaitForY(num_done);
      block.IssueDp(y_stage);
      FenceRegisters(block.scores);
      if (flags & kMasked) block.Hide(shared.block[x_stage]);
      if constexpr (Config::kHasSoftcap) {
        block.CapScores();
        WaitWgmma<0>();
        FenceRegisters(block.dp);
        block.CappedGradients(x_stage);
        block.IssueDy(y_stage);
      } else {
        block.Probabilities(x_stage);
        block.IssueDy(y_stage);
        WaitWgmma<1>();
        FenceRegisters(block.dp);
        block.ScoreGradients();
      }
      block.WriteDs(Ds(ds_stage));
      block.IssueDx(x_stage);
      WaitWgmma<1>();
      FenceRegisters(block.dy);
      ArriveByWarp(&shared.y_empty[y_stage], thread);
      ++num_done;
      x_ring.Advance();
      FenceAsyncProxy();
      NamedSync(kDsWritten, Config::kNumConsumers * kWarpgroup);
      block.IssueDq(Ds(ds_stage));
      if constexpr (Config::kWaitsForDx) {
        WaitWgmma<1>();
        FenceRegisters(block.dx);
      }
      IssueNextScores(is_last ? x_before : x_ring);
      WaitWgmma<1>();
      FenceRegisters(block.dq);
      FenceRegisters(block.dx);
      SetDqTarget(x_stage, ds_stage);
      AddDq(ds_stage);
      Arrive(&shared.x_empty[x_stage]);
      block.ReadStatistics(x_ring.stage);
      WaitWgmma<0>();
    }
  }

  // Issues scores and dP together, then, from dS in registers and in shared memory, dV, dQ and dK.
  // No product is in flight across iterations. dQ is copied to shared memory during the product for
  // dK, which leaves it half of the bandwidth.
  //
  // A late dQ is that of the previous block, whose dS both warpgroups have written long before: one
  // of them may then compute while the other one uses the tensor cores.
  __device__ __forceinline__ void ComputeInTwoBursts() {
    bool is_first = true;
    for (bool is_last = false; !is_last;) {
      // The shuffles tell the compiler that the values are uniform in a warp.
      const int x_stage = __shfl_sync(~0u, x_ring.stage, 0);
      num_done = __shfl_sync(~0u, num_done, 0);
      const int y_stage = YStage(num_done);
      const int parity = num_done % 2, dq_parity = Config::kDqIsLate ? parity ^ 1 : parity;
      const int ds_stage = kDsIsByX ? x_stage : parity;
      const int dq_stage = kDsIsByX ? __shfl_sync(~0u, x_ring.Before().stage, 0) : dq_parity;
      WaitForX();
      block.ReadStatistics(x_stage);
      // Otherwise ptxas copies these registers after the first product, and waits for that product.
      FenceRegisters(block.dp);
      block.IssueScores(x_stage);
      const int flags = BlockFlags();
      is_last = flags & kLast;
      WaitForY(num_done);
      block.IssueDp(y_stage);
      WaitWgmma<1>();
      FenceRegisters(block.scores);
      if constexpr (Config::kHasTerms) {
        Terms().Add(x_stage, Ds(ds_stage), &shared.bias_full[ds_stage],
                    kDsIsByX ? x_ring.phase : num_done / 2 % 2);
      }
      if (flags & kMasked) block.Hide(shared.block[x_stage]);
      ProbabilitiesAndGradients(x_stage);
      if constexpr (Config::kDqIsLate) WaitForDs(num_done - 1);
      block.WriteDs(Ds(ds_stage));
      block.IssueDy(y_stage);
      if constexpr (Config::kStoresDs) {
        if (warpgroup == 0 && thread == 0) {
          shared.ds_info[ds_stage] = {shared.block[x_stage], shared.target[x_stage].head,
                                      block.Tile().batch, block.Tile().begin};
        }
      }
      FenceAsyncProxy();
      if constexpr (!Config::kDqIsLate) NamedSync(kDsWritten, Config::kDsThreads);
      // In the first block, a late dQ is a product of stale data, and is not used: with a branch,
      // ptxas would serialize all products.
      block.IssueDq(Ds(dq_stage));
      WaitWgmma<1>();
      FenceRegisters(block.dy);
      ArriveByWarpAtAll<Config::kClusterSize>(&shared.y_empty[y_stage], thread);
      block.IssueDx(x_stage);
      WaitWgmma<1>();
      FenceRegisters(block.dq);
      if constexpr (Config::kStoresDs) {
        if (!Config::kDqIsLate || !is_first) ArriveByWarp(&shared.ds_empty[dq_stage], thread);
      }
      if constexpr (!Config::kDqIsLate) SetDqTarget(x_stage, parity);
      if (!Config::kDqIsLate || !is_first) AddDq(dq_parity);
      is_first = false;
      if constexpr (Config::kDqIsLate) SetDqTarget(x_stage, parity);
      WaitWgmma<0>();
      FenceRegisters(block.dx);
      GiveBackX(x_stage);
      // The other warpgroup may now read this dS, and overwrite the previous one.
      if constexpr (Config::kDqIsLate) ArriveByWarp(&shared.ds_full[ds_stage], thread);
      ++num_done;
      x_ring.Advance();
    }
    if constexpr (Config::kDqIsLate) {
      const int dq_parity = (num_done - 1) % 2;
      const int dq_stage = kDsIsByX ? __shfl_sync(~0u, x_ring.Before().stage, 0) : dq_parity;
      WaitForDs(num_done - 1);
      block.IssueDq(Ds(dq_stage));
      WaitWgmma<0>();
      FenceRegisters(block.dq);
      if constexpr (kDsIsByX) ArriveByWarp(&shared.ds_empty[dq_stage], thread);
      AddDq(dq_parity);
    }
  }

  // The gradients of keys and values leave registers for one more product at a time: for scores,
  // for dP next to packed probabilities, or for dQ of the previous block, whose dS both warpgroups
  // have written long before. Only dV and dK need no more registers, and overlap with the work that
  // follows the product before them. The tensor cores are then free for the other warpgroup, which
  // is half a block behind.
  __device__ __forceinline__ void ComputeInTurns() {
    // Marks the tile's first block in num_done, as no other register is free.
    constexpr uint32_t kFirst = 1u << 31;
    num_done |= kFirst;
    for (bool is_last = false; !is_last;) {
      // The shuffle tells the compiler that the value is uniform in a warp.
      num_done = __shfl_sync(~0u, num_done, 0);
      // All ring positions are derived from the number of blocks, which saves a register.
      static_assert(Config::kXStages == 2 && Config::kDsStages == 2);
      const int parity = num_done % 2, x_stage = parity, y_stage = YStage(num_done);
      x_ring = {parity, num_done / 2 % 2};
      WaitForX();
      block.IssueScores(x_stage);
      block.ReadStarts(x_stage);
      const int flags = BlockFlags();
      is_last = flags & kLast;
      WaitWgmma<0>();
      FenceRegisters(block.scores);
      if (flags & kMasked) block.Hide(shared.block[x_stage]);
      if constexpr (Config::kHasSoftcap) {
        WaitForDs(num_done - 1);
        block.CappedProbabilities(x_stage, Ds(parity));
      } else {
        block.Probabilities(x_stage);
        HoldProbabilities();
      }
      block.ReadDeltas(x_stage);
      WaitForY(num_done);
      block.IssueDp(y_stage);
      block.IssueDy(y_stage);
      WaitWgmma<1>();
      FenceRegisters(block.dp);
      if constexpr (Config::kHasSoftcap) {
        block.CappedScoreGradients(Ds(parity));
      } else {
        block.ScoreGradients();
      }
      block.IssueDx(x_stage);
      if constexpr (!Config::kHasSoftcap) WaitForDs(num_done - 1);
      block.WriteDs(Ds(parity));
      FenceAsyncProxy();
      WaitWgmma<1>();
      FenceRegisters(block.dy);
      ArriveByWarp(&shared.y_empty[y_stage], thread);
      WaitWgmma<0>();
      FenceRegisters(block.dx);
      // In the first block this is a product of stale data, and is not used: with a branch, ptxas
      // would serialize all products.
      block.IssueDqByQuery(Ds(parity ^ 1));
      WaitWgmma<0>();
      FenceRegisters(block.dq);
      // The other warpgroup may now read this dS, and overwrite the previous one.
      ArriveByWarp(&shared.ds_full[parity], thread);
      if (!(num_done & kFirst)) AddDqByQuery(parity ^ 1);
      SetDqTarget(x_stage, parity);
      if constexpr (Config::kHasSoftcap) is_last = BlockFlags() & kLast;  // Saves a register.
      GiveBackX(x_stage);
      num_done = (num_done & ~kFirst) + 1;
    }
    // Otherwise the compiler keeps the phase of the last block's queries, because it equals that of
    // its dS, and with a cap there is no register for it.
    if constexpr (Config::kHasSoftcap) asm volatile("" : "+r"(num_done));
    const int dq_parity = (num_done - 1) % 2;
    WaitForDs(num_done - 1);
    block.IssueDqByQuery(Ds(dq_parity));
    WaitWgmma<0>();
    FenceRegisters(block.dq);
    AddDqByQuery(dq_parity);
  }

  // Whether dS has as many stages as queries, at the same positions; otherwise it has two stages in
  // turn.
  static constexpr bool kDsIsByX = Config::kDsStages != 2;

  // Waits until both warpgroups have written the dS of the block before this one, given by its
  // number, and have read that of the block before it. Blocks are counted over all tiles; before
  // the first block there is nothing to wait for.
  __device__ __forceinline__ void WaitForDs(uint32_t number) {
    if constexpr (kDsIsByX) {
      const RingPosition<Config::kXStages> before = x_ring.Before();
      Wait(&shared.ds_full[before.stage], before.phase);
    } else {
      Wait(&shared.ds_full[number % 2], number / 2 % 2);
    }
  }

  // Computes dS from scores, and from dP, which is complete a little later.
  __device__ __forceinline__ void ProbabilitiesAndGradients(int x_stage) {
    const bool has_cap = Config::kHasAnyTerms && block.scale.inverse_cap != 0.0f;
    if (has_cap) {
      block.CapScores();
    } else {
      block.Probabilities(x_stage);
    }
    HoldProbabilities();
    WaitWgmma<0>();
    FenceRegisters(block.dp);
    if (has_cap) {
      block.CappedGradients(x_stage);
    } else {
      block.ScoreGradients();
    }
    if constexpr (Config::kHasTerms) Terms().AddGradients(x_stage);
  }

  __device__ __forceinline__ BackwardBlockTerms<Config> Terms() { return {block}; }

  __device__ __forceinline__ int BlockFlags() const {
    return LoadByWarp(shared.block[x_ring.stage].flags);
  }
  // All threads arrive at the barrier of their own CTA, because all have read words of the stage.
  // One thread per warp arrives at that of the other CTA of a cluster, whose part of the stage is
  // read only by products.
  __device__ __forceinline__ void GiveBackX(int stage) {
    Arrive(&shared.x_empty[stage]);
    if constexpr (Config::kClusterSize > 1) {
      __syncwarp();
      if (thread % 32 == 0) ArriveUnorderedAt(&shared.x_empty[stage], ClusterRank() ^ 1);
    }
  }
  __device__ __forceinline__ void WaitForX() { Wait(&shared.x_full[x_ring.stage], x_ring.phase); }

  // After the last block these scores are not used. They are issued anyway, from the position of
  // the last block: with a branch, ptxas would serialize all products.
  __device__ __forceinline__ void IssueNextScores(RingPosition<Config::kXStages> position) {
    Wait(&shared.x_full[position.stage], position.phase);
    block.IssueScores(x_ring.stage);
  }

  // Probabilities are never negative, so this never waits. But the branch keeps ptxas from
  // computing them after the next wait.
  __device__ __forceinline__ void HoldProbabilities() {
    if (IsAnyNegative(block.scores)) WaitForX();
  }

  // --- dQ: from registers to shared memory, from where DqAdder takes it ---

  // Blocks alternate between the phases of dQ's barriers as they do between the stages of dS.
  __device__ __forceinline__ void AddDq(int ds_stage) {
    const int lane = thread % 32;
    float* box = shared.dq + warpgroup * Config::kDqQueries * 64;
    Wait(&shared.dq_empty[warpgroup], ds_stage ^ 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int dim = thread / 32 * 16 + lane / 4 + 8 * r;
      float* pair = box + DqSumPlace(2 * (lane % 4), dim);
#pragma unroll
      for (int i = 0; i < Config::kDqQueries / 8; ++i) {
        *reinterpret_cast<float2*>(pair + i * 8 * 64) =
            make_float2(block.dq[4 * i + 2 * r], block.dq[4 * i + 2 * r + 1]);
      }
    }
    FenceAsyncProxy();
    ArriveByWarp(&shared.dq_full[warpgroup], thread);
  }

  // The same if the rows of the product are queries.
  __device__ __forceinline__ void AddDqByQuery(int ds_stage) {
    Wait(&shared.dq_empty[warpgroup], ds_stage ^ 1);
    block.StoreDqByQuery(block.dq);
    FenceAsyncProxy();
    ArriveByWarp(&shared.dq_full[warpgroup], thread);
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_CONSUMER_CUH_
