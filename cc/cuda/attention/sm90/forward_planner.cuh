// The forward kernel's planner: a dedicated warp that fetches the next tile and loads its queries,
// while the producer works on the current tile.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_PLANNER_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_PLANNER_CUH_

#include "cc/cuda/attention/sm90/forward_tile.cuh"

namespace jax_magi::cuda::sm90 {

template <typename Config>
struct Planner {
  static constexpr int kClusterSize = Config::kClusterSize;
  const ForwardParamsOf<Config>& params;
  ForwardShared<Config>& shared;
  int lane;
  RingPosition<Config::kQStages> q_ring;

  __device__ __forceinline__ void Run() {
    PlannedTile& planned = shared.planned;
    if constexpr (Config::kCutsKeys) {
      shared.parts.Start(params.work, params.parts.parts != nullptr, lane);
    }
    if (lane == 0) planned.num_done = 0;
    uint32_t number = blockIdx.x / kClusterSize;
    while (shared.parts.Has(number, params.work, lane)) {
      FindWork(params.work, shared.parts, number, lane, planned);
      FindHeads();
      HandOn();
      LoadTile();
      Wait(&shared.planned_empty, planned.num_done % 2);
      WaitForPreviousKernel();  // The previous kernel resets the counter.
      number = NextNumber(planned.num_done);
      __syncwarp();
      if (lane == 0) ++planned.num_done;
      __syncwarp();
    }
    if (lane == 0) planned.tile.num_blocks = -1;
    HandOn();
    Wait(&shared.q_empty[q_ring.stage], q_ring.phase ^ 1);
    if (lane == 0) {
      shared.tile[TileSlot<Config>(q_ring)].num_blocks = -1;
      Arrive(&shared.q_full[q_ring.stage]);
    }
  }

  // Passes the tile to the producer.
  __device__ __forceinline__ void HandOn() { Arrive(&shared.planned_full); }

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

  // Finds the heads whose rows the tile has.
  __device__ __forceinline__ void FindHeads() {
    if (lane == 0) {
      PlannedTile& planned = shared.planned;
      planned.kv_head = Divide(planned.pack, params.packs_per_kv_head);
      const int most = Log2Pack<Config>(planned.tile.num_rows, params.group / kClusterSize);
      planned.log2_pack = Min(most, params.log2_pack + ForwardParams::kNumPacks - 1);
      // `first` is the first of the cluster's heads in their group, and `in_group` that of this
      // CTA.
      const int pack_in_group = planned.pack - planned.kv_head * params.packs_per_kv_head;
      const int first = pack_in_group * kClusterSize << params.log2_pack;
      const int in_group = first + (Rank() << planned.log2_pack);
      // In a cluster no heads may be left for this CTA: its results are then not used, but it loads
      // its part of the keys.
      planned.head = planned.kv_head * params.group +
                     (kClusterSize == 1 ? in_group : Min(in_group, params.group - 1));
      planned.num_packed = Min(1 << planned.log2_pack, params.group - in_group);
      if (first % (kClusterSize << planned.log2_pack) != 0) {  // Packed with heads before these.
        planned.tile.num_rows = planned.tile.num_blocks = planned.tile.slice_end = 0;
      }
    }
    __syncwarp();
  }

  // Describes the tile to consumers, and loads its queries.
  __device__ __forceinline__ void LoadTile() {
    const int stage = q_ring.stage, slot = TileSlot<Config>(q_ring);
    Wait(&shared.q_empty[stage], q_ring.phase ^ 1);
    q_ring.Advance();
    if (lane == 0) {
      const PlannedTile& planned = shared.planned;
      const Tile& tile = planned.tile;
      if constexpr (Config::kHasTerms) {
        const float* slopes = params.terms.slopes;
        shared.tile[slot].slope =
            slopes == nullptr ? 0.0f
                              : slopes[int64_t{tile.batch} * params.num_q_heads + planned.head];
      }
      static_cast<TileInfo&>(shared.tile[slot]) = {
          tile.batch, planned.head,  planned.num_packed, planned.log2_pack,
          tile.begin, tile.num_rows, tile.num_blocks,    Config::kCutsKeys ? planned.part : 0};
      if (!Config::kQueriesByValues && tile.num_blocks > 0) {
        ArriveExpectBytes(&shared.q_full[stage], sizeof(shared.q[stage]));
        // Indexed by how far log2_pack exceeds that of a tile with all rows.
        const CUtensorMap& map = params.q_map[planned.log2_pack - params.log2_pack];
#pragma unroll
        for (int d = 0; d < Config::kHeadDim; d += 64) {
          LoadBox(&map, &shared.q_full[stage], shared.q[stage] + d * Config::kBlockM, d,
                  planned.head, tile.begin, tile.batch);
        }
      } else {
        Arrive(&shared.q_full[stage]);
      }
    }
    __syncwarp();
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_PLANNER_CUH_
