// How the backward kernel adds the dQ of a block to the sum.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_DQ_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_DQ_CUH_

#include "cc/cuda/attention/dq_order.h"
#include "cc/cuda/attention/sm80/backward_products.cuh"
#include "cc/cuda/attention/sm80/backward_shared.cuh"

namespace jax_magi::cuda::sm80 {

// Adds two floats to neighbouring ones in memory.
__device__ __forceinline__ void AddPair(float* sum, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(sum), "f"(x), "f"(y)
               : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum + 1), "f"(y) : "memory");
#endif
}

template <typename Config>
struct BackwardDq {
  using Element = typename Config::Element;
  static constexpr int kQueries = Config::kQueries;
  using KTile = SharedTile<Config::kHeadDim>;
  using DsTile = SharedTile<kQueries>;

  const BackwardParams& params;
  BackwardShared<Config>& shared;

  // Adds the dQ of a block, of this warp's share of dims and queries, to the sum.
  __device__ __forceinline__ void Add(const BlockInfo& info, int ds_stage) const {
    const int thread = ThreadAnew(), lane = thread % 32, warp = thread / 32;
    const int first_query = warp % Config::kDqShares * Config::kDqQueries;
    const int first_dim = warp / Config::kDqShares * Config::kDqDims;
    const DsTile ds_tile{SharedAddress(shared.ds[ds_stage])};
    const KTile keys{SharedAddress(shared.k)};
    // Indexed by a piece of the rows of the product, which are dims, or queries if kDqByQuery.
    constexpr int kRows = Config::kDqByQuery ? Config::kDqQueries : Config::kDqDims;
    constexpr int kColumns = Config::kDqByQuery ? Config::kDqDims : Config::kDqQueries;
    float dq[kRows / 16][kColumns / 2];
#pragma unroll
    for (int m = 0; m < kRows / 16; ++m) {
#pragma unroll
      for (float& x : dq[m]) x = 0.0f;
    }
    if constexpr (Config::kDqByQuery) {
      MultiplyKeys(lane, ds_tile, first_query, keys, first_dim, dq);
    } else {
      MultiplyKeys(lane, keys, first_dim, ds_tile, first_query, dq);
    }
    const int query = info.begin + first_query;
    const int head = shared.walk.tile.batch * params.num_q_heads + info.head;
    if (params.dq_order.is_fixed()) WaitForTurns(query, head);
    const int panel = first_dim / Config::kDqPanelDims, in_panel = first_dim % Config::kDqPanelDims;
    float* of_panel =
        params.dq_sum +
        (int64_t{head} * Config::kHeadDim + panel * Config::kDqPanelDims) * params.dq_sum_rows;
    // Additions whose addresses differ by a constant are neighbours in the loops.
    if constexpr (Config::kDqByQuery) {
      of_panel += DqSumPlaceByQuery(lane / 4, in_panel + 2 * (lane % 4));
#pragma unroll
      for (int m = 0; m < kRows / 16; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float* eight = of_panel + OffsetOfEight(query + 16 * m + 8 * r);
#pragma unroll
          for (int i = 0; i < kColumns / 8; ++i) {
            AddPair(eight + DqSumPlaceByQuery(0, 8 * i), dq[m][4 * i + 2 * r],
                    dq[m][4 * i + 2 * r + 1]);
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        float* eight = of_panel + OffsetOfEight(query + 8 * i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float* place = eight + DqSumPlace(2 * (lane % 4), in_panel + 8 * r + lane / 4);
#pragma unroll
          for (int m = 0; m < kRows / 16; ++m) {
            AddPair(place + DqSumPlace(0, 16 * m), dq[m][4 * i + 2 * r], dq[m][4 * i + 2 * r + 1]);
          }
        }
      }
    }
    if (params.dq_order.is_fixed()) EndTurns(info, head);
  }

 private:
  // Where a group of eight queries is in a panel. A block may extend past the rows of the sum: what
  // it has there is zero, and may be added anywhere.
  __device__ __forceinline__ int64_t OffsetOfEight(int query) const {
    return int64_t{Min(query, params.dq_sum_rows - 8)} * Config::kDqPanelDims;
  }

  // c[rows, columns] += left^T * right, over all keys, which are the rows of both tiles.
  template <int kLeftDim, int kRightDim, int kNumPieces, int kCount>
  __device__ __forceinline__ static void MultiplyKeys(int lane, SharedTile<kLeftDim> left_tile,
                                                      int first_row,
                                                      SharedTile<kRightDim> right_tile,
                                                      int first_column,
                                                      float (&c)[kNumPieces][kCount]) {
    const LeftColumns<kLeftDim> left(left_tile, lane);
    const RightColumns<kRightDim> right(right_tile, lane);
#pragma unroll
    for (int k = 0; k < Config::kKeys; k += 16) {
      uint32_t a[kNumPieces][4];
#pragma unroll
      for (int m = 0; m < kNumPieces; ++m) left.Load(k, first_row + 16 * m, a[m]);
#pragma unroll
      for (int i = 0; i < 2 * kCount; i += 16) {
        uint32_t b[4];
        right.Load(k, first_column + i, b);
        MultiplyPieces<Element>(a, b, [&](int m) { return c[m] + i / 2; });
      }
    }
  }

  // --- Turns: see dq_order.h ---

  // Waits until it is the tile's turn to add to kDqQueries queries from `query` on, in all panels.
  __device__ __forceinline__ void WaitForTurns(int query, int head) const {
    const DqOrder& order = params.dq_order;
    const int num_queries = Min(Config::kDqQueries, params.dq_sum_rows - query);
    ForEachUnit(query, num_queries, head, ThreadAnew() % 32, 32, [&](int32_t* done, DqTurn turn) {
      while (LoadCounter(done + turn.part * order.num_counters) < turn.num_before) {
      }
      __threadfence();  // What this thread adds comes after what it has seen.
    });
    __syncwarp();
  }

  // Ends the tile's turn in all units that the block has. Called by all warps.
  __device__ __forceinline__ void EndTurns(const BlockInfo& info, int head) const {
    const DqOrder& order = params.dq_order;
    __threadfence();  // The counters come after what this thread has added.
    __syncthreads();
    const int num_queries = Min(kQueries, params.dq_sum_rows - info.begin);
    ForEachUnit(info.begin, num_queries, head, ThreadAnew(), Config::kThreads,
                [&](int32_t* done, DqTurn turn) {
                  AddToCounter(done + turn.part * order.num_counters, 1);
                });
  }

  // Calls fun(done, turn) for each unit that the tile visits in these queries, and for each panel:
  // one of `num_threads` threads does it.
  template <typename Fun>
  __device__ __forceinline__ void ForEachUnit(int query, int num_queries, int head, int thread,
                                              int num_threads, Fun fun) const {
    if (num_queries <= 0) return;
    const DqOrder& order = params.dq_order;
    constexpr int kNumPanels = Config::kHeadDim / Config::kDqPanelDims;
    const int first = order.UnitOf(query);
    const int num_units = order.UnitOf(query + num_queries - 1) - first + 1;
    for (int i = thread; i < num_units * kNumPanels; i += num_threads) {
      const int unit = first + i / kNumPanels, panel = head * kNumPanels + i % kNumPanels;
      const int packed = order.turns[int64_t{shared.walk.tile.index} * order.num_units + unit];
      if (packed == kNotVisited) continue;
      fun(order.done + int64_t{panel} * order.num_units + unit, DqTurn::Unpack(packed));
    }
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_DQ_CUH_
