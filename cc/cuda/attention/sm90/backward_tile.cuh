// The parameters, the shared memory and the barriers of the backward kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_TILE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_TILE_CUH_

#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/attention/dq_order.h"
#include "cc/cuda/attention/head_cuts.cuh"
#include "cc/cuda/attention/sm90/backward_terms.cuh"
#include "cc/cuda/attention/sm90/config.h"
#include "cc/cuda/attention/sm90/hopper.cuh"
#include "cc/cuda/attention/sm90/pipeline.cuh"

namespace jax_magi::cuda::sm90 {

struct BackwardParams {
  // The operands of scores (q, k) and of dP (dout, v), by role: rows of the tile stay in shared
  // memory, columns stream past them.
  CUtensorMap row_x_map, row_y_map, column_x_map, column_y_map;
  float* dq_sum;  // See DqSum.
  int dq_sum_rows;
  DqOrder dq_order;  // The order of additions to it.
  WorkParams work;
  int batch, q_len, num_q_heads, group;
  int num_kv_heads;
  // A kv head's query heads are split into packs, each of which visits the key tile separately.
  uint32_t packs_per_kv_head, heads_per_pack;
  int columns_per_head;  // Processed for all query heads before the next columns.
  int head_dim, value_dim;
  float softmax_scale, softcap;
  const QueryStatistic* statistics;
  int padded_queries;  // Per head.
  // dK and dV: [packs_per_kv_head, batch, rows, num_kv_heads, dim].
  void *dx, *dy;
  bool is_float;  // Whether dK and dV are float32; otherwise they have the dtype of the operands.
};

// The parameters of a call with terms.
struct BackwardTermsParams : BackwardParams {
  CUtensorMap bias_map, dbias_map;
  ScoreTerms terms;
  TermGradients gradients;
};
// The parameters of a call whose heads are split.
struct BackwardCutParams : BackwardParams {
  HeadCutParams head_cuts;
};
template <typename Config>
using BackwardParamsOf =
    std::conditional_t<Config::kHasTerms, BackwardTermsParams,
                       std::conditional_t<Config::kCutsHeads, BackwardCutParams, BackwardParams>>;

struct alignas(16) RowTileInfo {
  int32_t batch, kv_head;
  int32_t pack_in_head;  // If heads are split: whether gradients are added to those of other parts.
  int32_t begin, num_rows, num_blocks;
  uint32_t next_phase;  // The phase of the row barrier for the next tile.
};

// Where the dQ of a block is added. After the last block, `head` is negative.
struct alignas(16) DqTarget {
  int32_t head, query, batch;
  int32_t tile;  // The key tile: its index in the list.
};

// Which panel of dims, and which queries of a block, a warpgroup adds to dQ in a step. With two
// steps, its barriers have the phase of the step, otherwise that of the block.
template <typename Config>
__device__ __forceinline__ int DqPanel(int warpgroup, int step) {
  return Config::kSplitQueries ? 0 : warpgroup * Config::kDqSteps + step;
}

template <typename Config>
__device__ __forceinline__ int DqFirstQuery(int warpgroup) {
  return Config::kSplitQueries ? warpgroup * Config::kDqQueries : 0;
}

// The state that a CTA shares with its cluster, if it is in one.
template <bool kIsInCluster>
struct BackwardCluster {
  ClusterWork work;
};
template <>
struct BackwardCluster<false> {};

// If warpgroups have roles: what the warpgroup that computes scores passes to the other one.
template <bool kHasRoles>
struct BackwardFactors {
  // The factors of dP, packed: each thread passes 16 bytes to the same thread of the other
  // warpgroup. One buffer per stage of dS.
  alignas(1024) uint4 factors[2][4][kWarpgroup];
  // All threads of the first warpgroup arrive, and the other one waits.
  uint64_t factors_full[2];
};
template <>
struct BackwardFactors<false> {};

template <typename Config>
struct BackwardShared : BackwardBias<Config, Config::kBiasByTma>,
                        BackwardCluster<(Config::kClusterSize > 1)>,
                        BackwardFactors<Config::kHasRoles> {
  static constexpr int kXStages = Config::kXStages, kYStages = Config::kYStages;
  using Element = typename Config::Element;
  alignas(1024) Element row_x[Config::kRowStages][Config::kBlockRows * Config::kHeadDim];
  alignas(1024) Element row_y[Config::kBlockRows * Config::kValueDim];
  alignas(1024) Element column_x[kXStages][Config::kBlockColumns * Config::kHeadDim];
  alignas(1024) Element column_y[kYStages][Config::kBlockColumns * Config::kValueDim];
  // [key panel][query][64 keys] per stage: one stage is written while others are still read.
  alignas(1024) Element ds[Config::kDsStages * Config::kBlockRows * Config::kBlockColumns];
  // A panel of dQ per warpgroup, laid out by DqSumPlace or DqSumPlaceByQuery.
  alignas(1024) float dq[2 * Config::kDqPanelDims * Config::kDqQueries];
  QueryStatistic statistics[kXStages][Config::kBlockColumns / 8];
  BlockInfo block[kXStages];
  DqTarget target[kXStages];
  RowTileInfo tile[Config::kRowStages];
  std::conditional_t<Config::kCutsHeads, HeadCutItem, WorkItem> item;  // Used only by the producer.
  DqTarget dq_target[2][2];  // For the panel of each warpgroup in `dq`, by the parity of the block.
  // Barriers. The producer and its TMA bytes arrive on `full`, where consumers wait; consumers
  // arrive on `empty`, where the producer waits.
  uint64_t row_full[Config::kRowStages], row_empty[Config::kRowStages];
  // With two row stages, row_y still has one: it is copied to registers at once.
  uint64_t row_y_empty;
  uint64_t x_full[kXStages], x_empty[kXStages], y_full[kYStages], y_empty[kYStages];
  // One per warpgroup. The warpgroup arrives on `full` and waits on `empty`; DqAdder does the
  // reverse.
  uint64_t dq_full[2], dq_empty[2];
  uint64_t ds_full[Config::kDsStages];  // Consumers of both warpgroups arrive and wait.
};

// Named barriers of the backward kernel. Barrier 0 is that of __syncthreads().
enum BackwardBarrier {
  // All consumers arrive when their part of dS is in shared memory, and wait: dQ's product reads
  // every part.
  kDsWritten = 1,
  // All consumers arrive and wait while they write zeros for hidden pairs.
  kZeros = 2,
  // Consumers arrive when no such zeros are left, and the producer waits.
  kZerosWritten = 3,
  // Both warps that add a block's dQ to memory in order arrive and wait when the dQ has been added.
  kDqAdded = 4,
};
constexpr int kZerosWrittenThreads = 2 * kWarpgroup + 32;

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_TILE_CUH_
