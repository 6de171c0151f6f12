// What the backward kernel's warps share: its parameters, its shared memory, and its barriers.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_TILE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_TILE_CUH_

#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/attention/dq_order.h"
#include "cc/cuda/attention/head_cuts.cuh"
#include "cc/cuda/attention/sm90/backward_terms.cuh"
#include "cc/cuda/attention/sm90/config.h"
#include "cc/cuda/attention/sm90/hopper.cuh"
#include "cc/cuda/attention/sm90/pipeline.cuh"

namespace jax_magi::cuda {

struct BackwardParams {
  // The operands of scores (q, k) and of dP (dout, v), by their role: rows of the tile stay,
  // columns stream past.
  CUtensorMap row_x_map, row_y_map, column_x_map, column_y_map;
  float* dq_sum;  // As DqSum says.
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
// The same, where heads are cut.
struct BackwardCutParams : BackwardParams {
  HeadCutParams head_cuts;
};
template <typename Config>
using BackwardParamsOf =
    std::conditional_t<Config::kHasTerms, BackwardTermsParams,
                       std::conditional_t<Config::kCutsHeads, BackwardCutParams, BackwardParams>>;

struct alignas(16) RowTileInfo {
  int32_t batch, kv_head;
  int32_t pack_in_head;  // Where heads are cut, whether gradients are added to others' instead.
  int32_t begin, num_rows, num_blocks;
  uint32_t next_phase;  // Of the barrier, for the tile after it.
};

// Where in memory dQ of a block belongs. After the last one, `head` is negative.
struct alignas(16) DqTarget {
  int32_t head, query, batch;
  int32_t tile;  // Of keys: its index in the list.
};

// Which panel of dims, and which of a block's queries, a warpgroup has in a step of adding dQ to
// memory. Where there are two steps, its barriers have the phase of the step, else that of the
// block.
template <typename Config>
__device__ __forceinline__ int DqPanel(int warpgroup, int step) {
  return Config::kSplitQueries ? 0 : warpgroup * Config::kDqSteps + step;
}

template <typename Config>
__device__ __forceinline__ int DqFirstQuery(int warpgroup) {
  return Config::kSplitQueries ? warpgroup * Config::kDqQueries : 0;
}

// What a block of threads has for its cluster, if it is in one.
template <bool kIsInCluster>
struct BackwardCluster {
  ClusterWork work;
};
template <>
struct BackwardCluster<false> {};

// What the warpgroup with scores hands to the other one, where they have roles.
template <bool kHasRoles>
struct BackwardFactors {
  // What dP is multiplied by, packed: 16 bytes of each thread, for the same thread of the other
  // warpgroup. For each stage of dS.
  alignas(1024) uint4 factors[2][4][kWarpgroup];
  uint64_t factors_full[2];  // The first warpgroup arrives, and the other one waits.
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
  // [key panel][query][64 keys], for each stage: one is written while others are still read.
  alignas(1024) Element ds[Config::kDsStages * Config::kBlockRows * Config::kBlockColumns];
  // For each warpgroup a panel of dQ, as DqSumPlace or DqSumPlaceByQuery says.
  alignas(1024) float dq[2 * Config::kDqPanelDims * Config::kDqQueries];
  QueryStatistic statistics[kXStages][Config::kBlockColumns / 8];
  BlockInfo block[kXStages];
  DqTarget target[kXStages];
  RowTileInfo tile[Config::kRowStages];
  std::conditional_t<Config::kCutsHeads, HeadCutItem, WorkItem> item;  // The producer's own.
  DqTarget dq_target[2][2];  // Of what each warpgroup has in `dq`, by the block's parity.
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

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_TILE_CUH_
