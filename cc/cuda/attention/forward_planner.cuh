// The forward kernel's planner: one warp that looks up the next tile while the producer is at the
// one before, and loads its queries.

#ifndef JAX_MAGI_CUDA_ATTENTION_FORWARD_PLANNER_CUH_
#define JAX_MAGI_CUDA_ATTENTION_FORWARD_PLANNER_CUH_

#include "cc/cuda/attention/forward_tile.cuh"

namespace jax_magi::cuda {

template <typename Config>
struct Planner {
  static constexpr int kClusterSize = Config::kClusterSize;
  const ForwardParamsOf<Config>& params;
  ForwardShared<Config>& shared;
  int lane;
  RingPosition<Config::kQStages> q_ring;

  __device__ __forceinline__ void Run() {
    if constexpr (Config::kCutsKeys) {
      shared.parts.Start(params.work, params.parts.parts != nullptr, lane);
    }
    shared.ahead.Plan(
        params.work, shared.parts, lane, blockIdx.x / kClusterSize, shared.planned,
        [&](uint32_t count) { return NextNumber(count); },
        [&](uint32_t number) {
          FindWork(params.work, shared.parts, number, lane, shared.planned);
          FindHead();
        },
        [&] { LoadTile(); });
    Wait(&shared.q_empty[q_ring.stage], q_ring.phase ^ 1);
    if (lane == 0) {
      shared.tile[TileSlot<Config>(q_ring)].num_blocks = -1;
      Arrive(&shared.q_full[q_ring.stage]);
    }
  }

  __device__ __forceinline__ uint32_t NextNumber(uint32_t count) {
    if constexpr (kClusterSize > 1) {
      return shared.work.Next(params.work, lane, count);
    } else {
      uint32_t number = 0;
      if (lane == 0) number = gridDim.x + atomicAdd(&params.work.counter->next_work, 1);
      return __shfl_sync(~0u, number, 0);
    }
  }

  __device__ __forceinline__ int Rank() const {
    if constexpr (kClusterSize == 1) return 0;
    return ClusterRank();
  }

  // How far the tile's log2_pack is above that of one with all rows.
  __device__ __forceinline__ int MorePacked() const {
    const int most = Log2Pack<Config>(shared.planned.tile.num_rows, params.group / kClusterSize) -
                     params.log2_pack;
    return Min(most, ForwardParams::kNumPacks - 1);
  }

  // The first of the cluster's heads, in their group.
  __device__ __forceinline__ int FirstInGroup() const {
    const PlannedTile& planned = shared.planned;
    const int in_group = planned.pack - planned.kv_head * params.packs_per_kv_head;
    return in_group * kClusterSize << params.log2_pack;
  }

  __device__ __forceinline__ void FindHead() {
    if (lane == 0) {
      PlannedTile& planned = shared.planned;
      planned.kv_head = Divide(planned.pack, params.packs_per_kv_head);
      const int log2_pack = params.log2_pack + MorePacked(), first = FirstInGroup();
      const int in_group = first + (Rank() << log2_pack);
      // In a cluster there may be none left: it then works in vain, for its part of the keys.
      planned.head = planned.kv_head * params.group +
                     (kClusterSize == 1 ? in_group : Min(in_group, params.group - 1));
      if (first % (kClusterSize << log2_pack) != 0) {  // Packed with heads before these.
        planned.tile.num_rows = planned.tile.num_blocks = planned.tile.slice_end = 0;
      }
    }
    __syncwarp();
  }

  // Tells consumers of the tile, and loads its queries.
  __device__ __forceinline__ void LoadTile() {
    const int stage = q_ring.stage, slot = TileSlot<Config>(q_ring);
    Wait(&shared.q_empty[stage], q_ring.phase ^ 1);
    q_ring.Advance();
    if (lane == 0) {
      const PlannedTile& planned = shared.planned;
      const Tile& tile = planned.tile;
      const int more = MorePacked(), log2_pack = params.log2_pack + more;
      const int in_group = FirstInGroup() + (Rank() << log2_pack);
      const int num_heads = Min(1 << log2_pack, params.group - in_group);
      if constexpr (Config::kHasTerms) {
        const float* slopes = params.terms.slopes;
        shared.tile[slot].slope =
            slopes == nullptr ? 0.0f
                              : slopes[int64_t{tile.batch} * params.num_q_heads + planned.head];
      }
      static_cast<TileInfo&>(shared.tile[slot]) = {
          tile.batch, planned.head,  num_heads,       log2_pack,
          tile.begin, tile.num_rows, tile.num_blocks, Config::kCutsKeys ? planned.part : 0};
      if (!Config::kQueriesByValues && tile.num_blocks > 0) {
        ArriveExpectBytes(&shared.q_full[stage], sizeof(shared.q[stage]));
#pragma unroll
        for (int d = 0; d < Config::kHeadDim; d += 64) {
          LoadBox(&params.q_map[more], &shared.q_full[stage], shared.q[stage] + d * Config::kBlockM,
                  d, planned.head, tile.begin, tile.batch);
        }
      } else {
        Arrive(&shared.q_full[stage]);
      }
    }
    __syncwarp();
  }
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_FORWARD_PLANNER_CUH_
