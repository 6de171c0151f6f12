// The backward kernel's producer: one warp that iterates over slices and streams query blocks.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_PRODUCER_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_PRODUCER_CUH_

#include "cc/cuda/attention/sm90/backward_tile.cuh"

namespace jax_magi::cuda::sm90 {

template <typename Config>
struct BackwardProducer {
  static constexpr int kClusterSize = Config::kClusterSize;
  const BackwardParamsOf<Config>& params;
  BackwardShared<Config>& shared;
  int lane;
  uint32_t num_loaded = 0;  // Number of blocks: the position in both rings.

  __device__ __forceinline__ void Run() {
    if constexpr (kClusterSize > 1) {
      ForEachWork(
          params.work, lane, shared.item, blockIdx.x / kClusterSize, [&] { LoadTile(); },
          [&] {
            const uint32_t next = shared.work.Next(params.work, lane, shared.item.num_done);
            if (lane == 0) shared.item.number = next;
          });
    } else {
      RunAlone();
    }
    const int stage = WaitForRowStage();
    if (lane == 0) {
      shared.tile[stage].num_blocks = -1;
      Arrive(&shared.row_full[stage]);
    }
  }

  __device__ __forceinline__ void RunAlone() {
    uint32_t first = blockIdx.x;
    if constexpr (Config::kZeroShare > 0) {
      if (first >= shared.num_workers) NamedSync(kZerosWritten, kZerosWrittenThreads);
    }
    if (first >= NumAssigned()) {
      WaitForPreviousKernel();  // The previous kernel resets the counter.
      if (lane == 0) first = NextWork();
    }
    const auto load = [&] { LoadTile(); };
    const auto next = [&] {
      if (lane == 0) shared.item.number = NextWork();
    };
    if constexpr (Config::kCutsHeads) {
      const HeadCutParams& cuts = params.head_cuts;
      // Kernels before this one write some of what is loaded, and reset the counter.
      WaitForPreviousKernel();
      HeadCutWork& all = shared.item.all;
      all.Start(params.work, cuts, lane);
      ForEachWork(
          lane, shared.item, first, [&](uint32_t number) { return all.Has(number); },
          [&](uint32_t number) { all.Find(params.work, cuts, number, lane, shared.item); }, load,
          next);
    } else {
      ForEachWork(params.work, lane, shared.item, first, load, next);
    }
  }

  // The rows of the tile that this CTA handles: all of them, or 128 in a cluster. In a tile that
  // meets no columns, no rows may be left.
  __device__ __forceinline__ decltype(auto) OwnRows() const {
    if constexpr (kClusterSize == 1) {
      return (shared.item.tile);
    } else {
      Tile own;
      const Range rows = shared.item.tile.rows();
      own.begin = rows.begin + static_cast<int>(ClusterRank()) * Config::kBlockRows;
      own.num_rows = Max(Min(rows.end, own.begin + Config::kBlockRows), own.begin) - own.begin;
      return own;
    }
  }

  // The number of CTAs whose first work is their own index. If work is ordered there are none: a
  // CTA that has not started yet must not own work that others wait for.
  __device__ __forceinline__ uint32_t NumAssigned() const {
    if (params.dq_order.is_fixed()) return 0;
    if constexpr (Config::kZeroShare > 0) return shared.num_workers;
    return gridDim.x;
  }
  __device__ __forceinline__ uint32_t NextWork() const {
    return NumAssigned() + atomicAdd(&params.work.counter->next_work, 1);
  }

  // Waits for the stage of the tile's rows to be free, and returns it.
  __device__ __forceinline__ int WaitForRowStage() {
    const int num_done = shared.item.num_done, stage = num_done % Config::kRowStages;
    Wait(&shared.row_empty[stage], num_done / Config::kRowStages % 2 ^ 1);
    if constexpr (Config::kRowStages > 1) Wait(&shared.row_y_empty, num_done % 2 ^ 1);
    return stage;
  }

  __device__ __forceinline__ void LoadTile() {
    const int stage = WaitForRowStage();
    if (lane == 0) {
      const Tile& tile = shared.item.tile;
      const int kv_head = KvHead();
      const int pack_in_head =
          Config::kCutsHeads ? shared.item.part : shared.item.pack % params.packs_per_kv_head;
      const Tile& own = OwnRows();
      const uint32_t next = shared.item.num_done + 1;
      shared.tile[stage] = {tile.batch,
                            kv_head,
                            pack_in_head,
                            own.begin,
                            own.num_rows,
                            tile.num_blocks,
                            next / Config::kRowStages % 2};
      if (tile.num_blocks > 0) {
        uint64_t* full = &shared.row_full[stage];
        ArriveExpectBytes(full, sizeof(shared.row_x[stage]) + sizeof(shared.row_y));
#pragma unroll
        for (int d = 0; d < Config::kHeadDim; d += Config::kRowPanelDims) {
          LoadBox(&params.row_x_map, full, shared.row_x[stage] + d * Config::kBlockRows, d, kv_head,
                  own.begin, tile.batch);
        }
#pragma unroll
        for (int d = 0; d < Config::kValueDim; d += 64) {
          LoadBox(&params.row_y_map, full, shared.row_y + d * Config::kBlockRows, d, kv_head,
                  own.begin, tile.batch);
        }
      } else {
        Arrive(&shared.row_full[stage]);
      }
    }
    if (lane == 0) {
      const int num_heads = Config::kCutsHeads ? shared.item.num_heads : params.heads_per_pack;
      shared.item.remaining = shared.item.tile.num_blocks * num_heads;
      if constexpr (!Config::kCutsHeads) shared.item.first_head = FirstHead();
      // If a tile meets several slices, it processes all of them for one head after another;
      // otherwise it processes some blocks for all heads, then the next blocks.
      const bool is_simple = shared.item.tile.slice_end - shared.item.tile.slice_begin <= 1;
      shared.item.num_heads = is_simple ? num_heads : 1;
    }
    __syncwarp();
    while (shared.item.remaining > 0) {
      LoadBlocks();
      __syncwarp();
      if (lane == 0) shared.item.first_head += shared.item.num_heads;
      __syncwarp();
    }
  }

  __device__ __forceinline__ int KvHead() const {
    if constexpr (Config::kCutsHeads) return shared.item.pack;
    return shared.item.pack / params.packs_per_kv_head;
  }

  __device__ __forceinline__ int FirstHead() const {
    return shared.item.pack / params.packs_per_kv_head * params.group +
           shared.item.pack % params.packs_per_kv_head * params.heads_per_pack;
  }

  __device__ __forceinline__ void LoadBlocks() {
    // Blocks go from right to left, some of them for all heads, then the next: under a causal mask,
    // tiles that run concurrently then read the same queries at about the same time.
    const auto load = [&](int slice, Range columns) {
      for (; columns.begin < columns.end; columns.end -= params.columns_per_head) {
        if (lane == 0) {
          const int first = Max(columns.begin, columns.end - params.columns_per_head);
          shared.item.slice = slice;
          shared.item.columns = {first, columns.end};
        }
        ForEachHead([&] {
          for (int end = shared.item.columns.end; end > shared.item.columns.begin;
               end -= Config::kBlockColumns) {
            // The first block may extend past `end`, as no block begins before 0.
            const int begin = Max(end - Config::kBlockColumns, 0);
            LoadX(begin, end);
            if constexpr (Config::kBiasByTma) LoadBias(begin);
            LoadY(begin);
            ++num_loaded;
          }
        });
      }
    };
    ForEachSlice</*kByKeys=*/true, /*kAlignsEnd=*/true>(params.work, shared.item.tile, lane, load);
  }

  // Calls load() for each query head of the turn. The head is in shared memory, because registers
  // are scarce.
  template <typename Load>
  __device__ __forceinline__ void ForEachHead(Load load) {
    if (lane == 0) shared.item.head = shared.item.first_head;
    __syncwarp();
    do {
      load();
      __syncwarp();
      if (lane == 0) ++shared.item.head;
      __syncwarp();
    } while (shared.item.head < shared.item.first_head + shared.item.num_heads);
    __syncwarp();  // All lanes have read the head before the first one writes the next.
  }

  __device__ __forceinline__ void LoadX(int begin, int end) {
    const int stage = num_loaded % Config::kXStages;
    Wait(&shared.x_empty[stage], num_loaded / Config::kXStages % 2 ^ 1);
    if (lane == 0) {
      const Tile& tile = shared.item.tile;
      Slice slice = LoadTileSlice</*kByKeys=*/true>(params.work, tile, shared.item.slice);
      const bool is_last = --shared.item.remaining == 0;
      const Tile& own = OwnRows();
      const bool is_clean = own.num_rows == Config::kBlockRows &&
                            begin + Config::kBlockColumns == end &&
                            IsClean(slice, own.rows(), begin, Config::kBlockColumns);
      // The box of rows may extend into the next tile. The rows of that tile are hidden here, and
      // add nothing to dQ.
      slice.q_begin = Max(slice.q_begin, own.begin);
      slice.q_end = Min(slice.q_end, own.rows().end);
      slice.k_end = Min(slice.k_end, end);
      shared.block[stage] = {slice, begin, (is_clean ? 0 : kMasked) | (is_last ? kLast : 0)};
      shared.target[stage] = {shared.item.head, begin, tile.batch, tile.index};
      constexpr uint32_t kStatistics = sizeof(shared.statistics[stage]);
      ArriveExpectBytes(&shared.x_full[stage], sizeof(shared.column_x[stage]) + kStatistics);
      const int head = tile.batch * params.num_q_heads + shared.item.head;
      LoadBulk(shared.statistics[stage],
               params.statistics + (int64_t{head} * params.padded_queries + begin) / 8, kStatistics,
               &shared.x_full[stage]);
      LoadColumns<Config::kHeadDim>(params.column_x_map, &shared.x_full[stage],
                                    shared.column_x[stage], begin);
    }
  }

  // Loads the bias to the stage of dS that the block will have. Key tiles and key blocks begin at
  // multiples of kPositionAlignment, as TMA requires.
  __device__ __forceinline__ void LoadBias(int begin) {
    const ScoreTerms& terms = params.terms;
    if constexpr (Config::kAreSlopesAlone) return;
    if (!Config::kIsBiasAlone && terms.kind != BiasKind::kTiles) return;
    const int stage = num_loaded % Config::kDsStages;
    Wait(&shared.ds_empty[stage], num_loaded / Config::kDsStages % 2 ^ 1);
    if (lane == 0) {
      constexpr int kElements = Config::kBlockRows * Config::kBlockColumns;
      ArriveExpectBytes(&shared.bias_full[stage], kElements * sizeof(typename Config::Element));
#pragma unroll
      for (int i = 0; i < Config::kBlockRows; i += 64) {
        LoadBoxOnce(&params.bias_map, &shared.bias_full[stage],
                    shared.ds + stage * kElements + i * Config::kBlockColumns,
                    shared.item.tile.begin + i, begin, BiasHead(), BiasBatch());
      }
    }
  }

  __device__ __forceinline__ int BiasHead() const {
    return params.terms.head_stride == 0 ? 0 : shared.item.head;
  }
  __device__ __forceinline__ int BiasBatch() const {
    return params.terms.batch_stride == 0 ? 0 : shared.item.tile.batch;
  }

  __device__ __forceinline__ void LoadY(int begin) {
    const int stage = num_loaded % Config::kYStages;
    Wait(&shared.y_empty[stage], num_loaded / Config::kYStages % 2 ^ 1);
    if (lane == 0) {
      ArriveExpectBytes(&shared.y_full[stage], sizeof(shared.column_y[stage]));
      LoadColumns<Config::kValueDim>(params.column_y_map, &shared.y_full[stage],
                                     shared.column_y[stage], begin);
    }
  }

  template <int kDim>
  __device__ __forceinline__ void LoadColumns(const CUtensorMap& map, uint64_t* full,
                                              typename Config::Element* dst, int begin) {
    LoadPanels<kClusterSize, kDim, Config::kBlockColumns>(
        map, full, dst, [&] { return shared.item.head; }, begin, shared.item);
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_PRODUCER_CUH_
