// The forward kernel's producer: one warp that iterates over a tile's slices and streams key
// blocks.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_PRODUCER_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_PRODUCER_CUH_

#include "cc/cuda/attention/sm90/forward_tile.cuh"

namespace jax_magi::cuda::sm90 {

template <typename Config>
struct Producer {
  using Shared = ForwardShared<Config>;
  static constexpr int kClusterSize = Config::kClusterSize;
  const ForwardParamsOf<Config>& params;
  Shared& shared;
  int lane;
  RingPosition<Config::kKStages> k_ring;
  RingPosition<Config::kVStages> v_ring;
  RingPosition<Config::kBiasStages> bias_ring;

  __device__ __forceinline__ void Run() {
    if (lane == 0) shared.item.num_done = ~0u;  // Number of tiles so far, minus one.
    __syncwarp();
    while (true) {
      Wait(&shared.planned_full, (shared.item.num_done + 1) % 2);
      TakeTile();
      if (shared.item.tile.num_blocks < 0) break;
      if constexpr (Config::kQueriesByValues) LoadQueries();
      LoadBlocks();
    }
    LetNextKernelStart();
  }

  // Copies what the planner passes on, one word per lane.
  __device__ __forceinline__ void TakeTile() {
    constexpr int kWords = sizeof(PlannedTile) / 4;
    static_assert(kWords <= 32, "a lane for each");
    __syncwarp();  // All lanes are done with the previous tile.
    if (lane < kWords) {
      reinterpret_cast<int32_t*>(&shared.item)[lane] =
          reinterpret_cast<const int32_t*>(&shared.planned)[lane];
    }
    __syncwarp();
  }

  // Called once per tile.
  __device__ __forceinline__ void AskForNextTile() { Arrive(&shared.planned_empty); }

  // Loads the queries to a stage of values, if the tile has any blocks.
  __device__ __forceinline__ void LoadQueries() {
    static_assert(sizeof(shared.v[0]) == Config::kBlockM * Config::kHeadDim * 2,
                  "as large as a stage");
    const Tile& tile = shared.item.tile;
    if (tile.num_blocks == 0) return;
    const int stage = v_ring.stage;
    Wait(&shared.v_empty[stage], v_ring.phase ^ 1);
    if (lane == 0) {
      ArriveExpectBytes(&shared.v_full[stage], sizeof(shared.v[stage]));
#pragma unroll
      for (int d = 0; d < Config::kHeadDim; d += 64) {
        LoadBox(&params.q_map[0], &shared.v_full[stage], shared.v[stage] + d * Config::kBlockM, d,
                shared.item.head, tile.begin, tile.batch);
      }
    }
    v_ring.Advance();
  }

  __device__ __forceinline__ void LoadBlocks() {
    const Tile& tile = shared.item.tile;
    int number = Config::kCutsKeys ? -shared.item.skipped : 0;  // The block's number in this part.
    int v_row = 0;  // v is loaded one block after k: scores come first.
    // The next tile is requested with the second-to-last block: the planner needs less time than
    // these two blocks take, and a CTA that takes work earlier may keep it from others in the end.
    const int asks_with = Max(tile.num_blocks - 2, 0);
    if (tile.num_blocks == 0) AskForNextTile();
    constexpr bool kAlignsEnd = Config::kHasTerms;
    const auto load = [&](int slice, Range keys) {
      // Blocks go from right to left, so that under a causal mask the diagonal comes first.
      for (; keys.begin < keys.end; keys.end -= Config::kBlockN, ++number) {
        if (number < 0 || number >= tile.num_blocks) continue;
        const bool is_last = number + 1 == tile.num_blocks;
        if (number == asks_with) AskForNextTile();
        LoadKeys(slice, keys.end - Config::kBlockN, is_last);
        if (number > 0) LoadValues(v_row);
        v_row = keys.end - Config::kBlockN;
      }
    };
    ForEachSlice</*kByKeys=*/false, kAlignsEnd>(params.work, tile, lane, load);
    if (tile.num_blocks > 0) LoadValues(v_row);
  }

  __device__ __forceinline__ void LoadKeys(int slice_index, int begin, bool is_last) {
    const int stage = k_ring.stage;
    Wait(&shared.k_empty[stage], k_ring.phase ^ 1);
    if (lane == 0) {
      const Tile& tile = shared.item.tile;
      const Slice slice = LoadTileSlice</*kByKeys=*/false>(params.work, tile, slice_index);
      const bool is_clean = IsClean(slice, tile.rows(), begin, Config::kBlockN);
      shared.block[stage] = {slice, begin, (is_clean ? 0 : kMasked) | (is_last ? kLast : 0)};
      ArriveExpectBytes(&shared.k_full[stage], sizeof(shared.k[stage]));
      LoadRows<Config::kHeadDim>(params.k_map, &shared.k_full[stage], shared.k[stage], begin);
    }
    if constexpr (Config::kHasTerms && !Config::kAreSlopesAlone) LoadBias(stage, begin);
    k_ring.Advance();
  }

  // Loads the bias of the tile's queries and the block's keys, which begin at a multiple of
  // kPositionAlignment, as TMA requires.
  __device__ __forceinline__ void LoadBias(int stage, int begin) {
    if constexpr (Config::kHasBiasBlocks) {
      if (!Config::kIsBiasAlone && params.terms.kind != BiasKind::kTiles) return;
      Wait(&shared.bias_empty[bias_ring.stage], bias_ring.phase ^ 1);
      if (lane == 0) LoadBiasBlock(bias_ring.stage, begin);
      bias_ring.Advance();
    } else if (params.terms.kind == BiasKind::kByKey) {
      Wait(&shared.bias_empty[stage], k_ring.phase ^ 1);
      if (!KeyBiasIsCopied(params)) {
        LoadKeyBias(stage, begin);
      } else if (lane == 0) {
        CopyKeyBias(stage, begin);
      }
    }
  }

  __device__ __forceinline__ void LoadBiasBlock(int stage, int begin) {
    const ScoreTerms& terms = params.terms;
    const Tile& tile = shared.item.tile;
    const int head = terms.head_stride == 0 ? 0 : shared.item.head;
    const int batch = terms.batch_stride == 0 ? 0 : tile.batch;
    ArriveExpectBytes(&shared.bias_full[stage], sizeof(shared.bias[stage]));
#pragma unroll
    for (int i = 0; i < Config::kBlockN; i += 64) {
      LoadBoxOnce(&params.bias_map, &shared.bias_full[stage],
                  shared.bias[stage] + i * Config::kBlockM, begin + i, tile.begin, head, batch);
    }
  }

  // Copies a bias that is the same for all queries. For keys outside the array, shared memory keeps
  // its old contents: these keys are hidden.
  __device__ __forceinline__ void CopyKeyBias(int stage, int begin) {
    const ScoreTerms& terms = params.terms;
    const int first = Max(begin, 0), end = Min(begin + Config::kBlockN, params.work.num_columns);
    const int size = terms.is_float ? sizeof(float) : sizeof(typename Config::Element);
    const int64_t offset = terms.Offset(shared.item.tile.batch, shared.item.head) + first;
    ArriveExpectBytes(&shared.bias_full[stage], (end - first) * size);
    LoadBulk(reinterpret_cast<char*>(shared.key_bias[stage]) + (first - begin) * size,
             static_cast<const char*>(terms.bias) + offset * size, (end - first) * size,
             &shared.bias_full[stage]);
  }

  // The same, element by element, by all lanes.
  __device__ __forceinline__ void LoadKeyBias(int stage, int begin) {
    const ScoreTerms& terms = params.terms;
    const int64_t offset = terms.Offset(shared.item.tile.batch, shared.item.head);
#pragma unroll
    for (int i = 0; i < Config::kBlockN; i += 32) {
      const int key = begin + i + lane;
      const bool is_inside = 0 <= key && key < params.work.num_columns;
      shared.key_bias[stage][i + lane] =
          is_inside ? terms.Load<typename Config::Element>(offset + key) : 0.0f;
    }
    Arrive(&shared.bias_full[stage]);
  }

  __device__ __forceinline__ void LoadValues(int row) {
    const int stage = v_ring.stage;
    Wait(&shared.v_empty[stage], v_ring.phase ^ 1);
    if (lane == 0) {
      ArriveExpectBytes(&shared.v_full[stage], sizeof(shared.v[stage]));
      LoadRows<Config::kValueDim>(params.v_map, &shared.v_full[stage], shared.v[stage], row);
    }
    v_ring.Advance();
  }

  // Loads a block of keys or values.
  template <int kDim>
  __device__ __forceinline__ void LoadRows(const CUtensorMap& map, uint64_t* full,
                                           typename Config::Element* dst, int row) {
    LoadPanels<kClusterSize, kDim, Config::kBlockN>(
        map, full, dst, [&] { return shared.item.kv_head; }, row, shared.item);
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_PRODUCER_CUH_
