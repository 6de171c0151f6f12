// The backward kernel's parameters, its shared memory, the warp that fills it, and the threads that
// carry dQ out of it.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_PRODUCER_CUH_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_PRODUCER_CUH_

#include "cc/cuda/attention/backward_terms.cuh"
#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/attention/config.h"
#include "cc/cuda/attention/dq_order.h"
#include "cc/cuda/attention/hopper.cuh"
#include "cc/cuda/attention/pipeline.cuh"

namespace jax_magi::cuda {

struct BackwardParams {
  // The operands of scores (q, k) and of dP (dout, v), by their role: rows of the tile stay,
  // columns stream past.
  CUtensorMap row_x_map, row_y_map, column_x_map, column_y_map;
  float* dq_sum;  // As DqSumPlace says.
  int dq_sum_rows;
  DqOrder dq_order;  // In which it is added to.
  WorkParams work;
  int batch, q_len, num_q_heads, group;
  int num_kv_heads;
  // Of a kv head: so many query heads meet one tile of keys.
  uint32_t packs_per_kv_head, heads_per_pack;
  int columns_per_head;  // Are worked on for all query heads in turn before the next.
  int head_dim, value_dim;
  float softmax_scale, softcap;
  const QueryStatistic* statistics;
  int padded_queries;  // In which a head has so many.
  // dK and dV: [packs_per_kv_head, batch, rows, num_kv_heads, dim].
  void *dx, *dy;
  bool is_float;  // Their element type; else that of the operands.
};

// The same, of a call with terms.
struct BackwardTermsParams : BackwardParams {
  CUtensorMap bias_map, dbias_map;
  ScoreTerms terms;
  TermGradients gradients;
};
template <typename Config>
using BackwardParamsOf = std::conditional_t<Config::kHasTerms, BackwardTermsParams, BackwardParams>;

struct alignas(16) RowTileInfo {
  int32_t batch, kv_head, pack_in_head, begin, num_rows, num_blocks;
  uint32_t next_phase;  // Of the barrier, for the tile after it.
};

// Where in memory dQ of a block belongs. After the last one, `head` is negative.
struct alignas(16) DqTarget {
  int32_t head, query, batch;
  int32_t tile;  // Of keys: its index in the list.
};

// Which panel of 64 dims, and which of a block's queries, a warpgroup has in a step of the product
// for dQ. Where there are two steps, its barriers have the phase of the step.
template <typename Config>
__device__ __forceinline__ int DqPanel(int warpgroup, int step) {
  return Config::kSplitQueries ? 0 : warpgroup * Config::kDqSteps + step;
}

template <typename Config>
__device__ __forceinline__ int DqFirstQuery(int warpgroup) {
  return Config::kSplitQueries ? warpgroup * Config::kDqQueries : 0;
}

// Of one of TMA's boxes: in a cluster, a block of threads loads half of the only panel, or one of
// two.
template <typename Config>
constexpr int kBoxColumns =
    Config::kHeadDim == 64 ? Config::kBlockColumns / Config::kClusterSize : Config::kBlockColumns;

// What a block of threads has for its cluster, if it is in one.
template <bool kIsInCluster>
struct BackwardCluster {
  ClusterWork work;
};
template <>
struct BackwardCluster<false> {};

template <typename Config>
struct BackwardShared : BackwardBias<Config, Config::kHasTerms>,
                        BackwardCluster<(Config::kClusterSize > 1)> {
  static constexpr int kXStages = Config::kXStages, kYStages = Config::kYStages;
  using Element = typename Config::Element;
  alignas(1024) Element row_x[Config::kRowStages][Config::kBlockRows * Config::kHeadDim];
  alignas(1024) Element row_y[Config::kBlockRows * Config::kValueDim];
  alignas(1024) Element column_x[kXStages][Config::kBlockColumns * Config::kHeadDim];
  alignas(1024) Element column_y[kYStages][Config::kBlockColumns * Config::kValueDim];
  // [key panel][query][64 keys], for each stage: one is written while others are still read.
  alignas(1024) Element ds[Config::kDsStages * Config::kBlockRows * Config::kBlockColumns];
  // For each warpgroup [queries / 2][64 dims][2 queries], as DqSumPlace says.
  alignas(1024) float dq[2 * 64 * Config::kDqQueries];
  QueryStatistic statistics[kXStages][Config::kBlockColumns / 8];
  BlockInfo block[kXStages];
  DqTarget target[kXStages];
  RowTileInfo tile[Config::kRowStages];
  WorkItem item;             // The producer's own.
  DqTarget dq_target[2][2];  // Of what each warpgroup has in `dq`, by phase.
  // Barriers. On `full`, the producer arrives and its bytes do, and consumers wait; on `empty`,
  // consumers arrive and the producer waits.
  uint64_t row_full[Config::kRowStages], row_empty[Config::kRowStages];
  uint64_t row_y_empty;  // Where these are two, row_y is one: it goes to registers at once.
  uint64_t x_full[kXStages], x_empty[kXStages], y_full[kYStages], y_empty[kYStages];
  // One for each warpgroup, which arrives on `full` and waits on `empty`; DqAdder does the
  // reverse.
  uint64_t dq_full[2], dq_empty[2];
  uint64_t ds_full[Config::kDsStages];  // Consumers of both warpgroups arrive and wait.
};

// Named barriers of the backward kernel. Barrier 0 is that of __syncthreads().
enum NamedBarrier {
  // All consumers arrive when their part of dS is in shared memory, and wait: the product for dQ
  // reads every part.
  kDsWritten = 1,
  // Of all consumers, while they write zeros for hidden pairs.
  kZeros = 2,
  // They arrive when there are no more of these, and the producer waits.
  kZerosWritten = 3,
  // Of both warps that add a block's dQ to memory in order, when it is there.
  kDqAdded = 4,
};
constexpr int kZerosWrittenThreads = 2 * kWarpgroup + 32;

// One warp.
template <typename Config>
struct BackwardProducer {
  static constexpr int kClusterSize = Config::kClusterSize;
  const BackwardParamsOf<Config>& params;
  BackwardShared<Config>& shared;
  int lane;
  uint32_t num_loaded = 0;  // Blocks: the position in both rings.

  __device__ __forceinline__ void Run() {
    if constexpr (kClusterSize > 1) {
      ForEachWork(
          params.work, lane, shared.item, blockIdx.x / kClusterSize, [&] { LoadTile(); },
          [&] { shared.work.Next(params.work, lane, shared.item); });
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
      WaitForPreviousKernel();  // It resets the counter.
      if (lane == 0) first = NextWork();
    }
    ForEachWork(
        params.work, lane, shared.item, first, [&] { LoadTile(); },
        [&] {
          if (lane == 0) shared.item.number = NextWork();
        });
  }

  // The rows of the tile that this block of threads has: all, or in a cluster, 128 of them. In
  // tiles that meet no columns there may be none left.
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

  // Blocks of threads whose first work is their own number. Where work is ordered there are none:
  // whoever has not come up yet must not have any that others wait for.
  __device__ __forceinline__ uint32_t NumAssigned() const {
    if (params.dq_order.is_fixed()) return 0;
    if constexpr (Config::kZeroShare > 0) return shared.num_workers;
    return gridDim.x;
  }
  __device__ __forceinline__ uint32_t NextWork() const {
    return NumAssigned() + atomicAdd(&params.work.counter->next_work, 1);
  }

  // Returns the stage of the tile's rows when it is free.
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
      const int kv_head = shared.item.pack / params.packs_per_kv_head;
      const int pack_in_head = shared.item.pack % params.packs_per_kv_head;
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
        for (int d = 0; d < Config::kHeadDim; d += 64) {
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
      shared.item.remaining = shared.item.tile.num_blocks * params.heads_per_pack;
      shared.item.first_head = FirstHead();
      // A tile that meets several slices takes them all for one head after the other; else some
      // blocks are taken for all heads, then the next.
      const bool is_simple = shared.item.tile.slice_end - shared.item.tile.slice_begin <= 1;
      shared.item.num_heads = is_simple ? params.heads_per_pack : 1;
    }
    __syncwarp();
    while (shared.item.remaining > 0) {
      LoadBlocks();
      __syncwarp();
      if (lane == 0) shared.item.first_head += shared.item.num_heads;
      __syncwarp();
    }
  }

  __device__ __forceinline__ int FirstHead() const {
    return shared.item.pack / params.packs_per_kv_head * params.group +
           shared.item.pack % params.packs_per_kv_head * params.heads_per_pack;
  }

  __device__ __forceinline__ void LoadBlocks() {
    // From right to left, some blocks for all heads, then the next: under a causal mask, tiles that
    // run side by side then read the same queries at about the same time.
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
            // The first block may reach past `end`, as no block begins before 0.
            const int begin = Max(end - Config::kBlockColumns, 0);
            LoadX(begin, end);
            if constexpr (Config::kHasTerms) LoadBias(begin);
            LoadY(begin);
            ++num_loaded;
          }
        });
      }
    };
    ForEachSlice</*kByKeys=*/true, /*kAlignsEnd=*/true>(params.work, shared.item.tile, lane, load);
  }

  // Calls load() for each query head of the turn. The head is kept in shared memory, as registers
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
      // The box of rows may reach into the next tile. Its rows are hidden here, and add nothing to
      // dQ.
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

  // To the stage of dS that the block will have. Tiles and blocks of keys begin at multiples of
  // kPositionAlignment: TMA takes no others.
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

  // One lane. In a cluster, each block of threads loads a part for all.
  template <int kDim>
  __device__ __forceinline__ void LoadColumns(const CUtensorMap& map, uint64_t* full,
                                              typename Config::Element* dst, int begin) {
    if constexpr (kClusterSize == 1) {
#pragma unroll
      for (int d = 0; d < kDim; d += 64) {
        LoadBox(&map, full, dst + d * Config::kBlockColumns, d, shared.item.head, begin,
                shared.item.tile.batch);
      }
    } else {
      const int part = static_cast<int>(ClusterRank());
      const int d = kDim == 64 ? 0 : 64 * part, row = kDim == 64 ? part * kBoxColumns<Config> : 0;
      LoadBoxForRanks(&map, full, dst + d * Config::kBlockColumns + row * 64,
                      (1 << kClusterSize) - 1, d, shared.item.head, begin + row,
                      shared.item.tile.batch);
    }
  }
};

// One warp: adds what consumer warpgroup `warpgroup` writes to shared memory to dQ.
template <typename Config>
struct DqAdder {
  const BackwardParamsOf<Config>& params;
  BackwardShared<Config>& shared;
  int warpgroup, lane;

  __device__ __forceinline__ void Run() {
    if (!params.dq_order.is_fixed() && lane > 0) return;  // One thread is enough.
    for (uint32_t phase = 0;; phase ^= 1) {
      Wait(&shared.dq_full[warpgroup], phase);
      const DqTarget& said = shared.dq_target[warpgroup][phase];
      DqTarget target = params.dq_order.is_fixed() ? LoadByWarp(said) : said;
      if (target.head < 0) break;
      target.query += DqFirstQuery<Config>(warpgroup);
      const int num_queries = Min(Config::kDqQueries, params.dq_sum_rows - target.query);
      const int panel =
          (target.batch * params.num_q_heads + target.head) * (Config::kHeadDim / 64) +
          DqPanel<Config>(warpgroup, Config::kDqSteps == 1 ? 0 : phase);
      int32_t* done = nullptr;  // Of this lane's unit.
      if (params.dq_order.is_fixed()) done = WaitForTurn(target, panel, num_queries);
      if (lane == 0) {
        if (num_queries > 0) {
          ReduceAdd(params.dq_sum + (int64_t{panel} * params.dq_sum_rows + target.query) * 64,
                    shared.dq + warpgroup * Config::kDqQueries * 64,
                    num_queries * 64 * sizeof(float));
        }
        CommitReduce();
        WaitReduceRead();
        Arrive(&shared.dq_empty[warpgroup]);
      }
      if (params.dq_order.is_fixed()) {
        // No fences: the addition is done in L2 when its thread has waited for it, and the next one
        // is not asked for before the counter was read from there.
        if (lane == 0) WaitReduce();
        __syncwarp();
        if (done != nullptr) AddToCounter(done, 1);
        // Where both adders have queries of the same panel: those of the tile's next block may be
        // the same, by another slice.
        if constexpr (Config::kSplitQueries) NamedSync(kDqAdded, 2 * 32);
      }
    }
    if (lane == 0) WaitReduce();
  }

  // Returns where this lane has to count the visit, if it has a unit.
  __device__ __forceinline__ int32_t* WaitForTurn(const DqTarget& target, int panel,
                                                  int num_queries) {
    const DqOrder& order = params.dq_order;
    const int unit = order.UnitOf(target.query) + lane;
    const bool is_inside = num_queries > 0 && unit <= order.UnitOf(target.query + num_queries - 1);
    int32_t* done = order.done + int64_t{panel} * order.num_units + unit;
    const int before =
        is_inside ? order.before[int64_t{target.tile} * order.num_units + unit] : kNotVisited;
    // Both are asked for at once: no counter is less than kNotVisited.
    while (__any_sync(~0u, is_inside && LoadCounter(done) < before)) {
    }
    return before != kNotVisited ? done : nullptr;
  }
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_PRODUCER_CUH_
