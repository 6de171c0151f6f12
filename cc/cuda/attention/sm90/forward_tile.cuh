// What the planner, the producer and the consumers of the forward kernel share.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_TILE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_TILE_CUH_

#include "cc/attention.h"
#include "cc/cuda/attention/join_parts.cuh"
#include "cc/cuda/attention/score_terms.cuh"
#include "cc/cuda/attention/sm90/config.h"
#include "cc/cuda/attention/sm90/hopper.cuh"
#include "cc/cuda/attention/sm90/pipeline.cuh"
#include "cc/cuda/attention/tile_info.h"

namespace jax_magi::cuda::sm90 {

// A tile of few rows is shared by 2^log2_pack query heads of a kv head: its row i is row i >>
// log2_pack of head i % 2^log2_pack. It holds as many heads as fit, but not more than needed for
// all.
template <typename Config>
JAX_MAGI_INLINE int Log2Pack(int num_rows, int group) {
  if constexpr (Config::kHasTerms) return 0;  // Each head has its own terms.
  int log2_pack = 0;
  const auto fits = [&](int pack) {
    return Config::kBlockM % pack == 0 && num_rows * pack <= Config::kBlockM;
  };
  while ((1 << log2_pack) < group && fits(2 << log2_pack)) ++log2_pack;
  return log2_pack;
}

struct ForwardParams {
  // The q maps are indexed by how far log2_pack exceeds that of a tile with all rows: shorter
  // tiles, at the ends of slices, pack more heads.
  static constexpr int kNumPacks = 3;
  CUtensorMap q_map[kNumPacks], k_map, v_map;
  WorkParams work;
  int q_len, num_q_heads, group, value_dim;
  int log2_pack, packs_per_kv_head;  // The values for a tile with all rows.
  float softmax_scale, softcap;
  const float* sink;
  void* out;
  float *lse, *max_logits;
  PartsParams parts;
  // For kernels with a float32 output: see ForwardArgs, and whether this call rounds to `out`.
  const float* running_out;  // The results to merge with, or null.
  bool is_rounded;
  bool keeps_rows;  // Each row sees keys in one call only; the others leave it unchanged.
};

// The parameters of a call with terms.
struct ForwardTermsParams : ForwardParams {
  CUtensorMap bias_map;
  ScoreTerms terms;
  bool is_out_float;
};
template <typename Config>
using ForwardParamsOf = std::conditional_t<Config::kHasTerms, ForwardTermsParams, ForwardParams>;

// Whether a bias that is the same for all queries is copied unchanged: its blocks must be multiples
// of 16 bytes in global memory, too.
__device__ __forceinline__ bool KeyBiasIsCopied(const ForwardTermsParams& params) {
  return params.work.num_columns % kPositionAlignment == 0;
}

// Shared memory for the bias of each key block.
template <typename Config, bool kHasTerms>
struct ForwardBias {};
template <typename Config>
struct ForwardBias<Config, true> {
  // [panel of 64 keys][row][64 keys], as written by TMA.
  alignas(1024) typename Config::Element
      bias[Config::kBiasStages][Config::kHasBiasBlocks ? Config::kBlockM * Config::kBlockN : 8];
  // A bias that is the same for all queries: float32, or elements of its own dtype if
  // KeyBiasIsCopied.
  alignas(16) float key_bias[Config::kBiasStages][Config::kHasBiasBlocks ? 4 : Config::kBlockN];
  // Like the barriers of keys. If the bias is the same for all queries, all consumer threads arrive
  // on `empty`, because each reads words of the bias; and all lanes of the producer arrive on
  // `full`, unless the bias is copied.
  uint64_t bias_full[Config::kBiasStages], bias_empty[Config::kBiasStages];
};

struct TermsTileInfo : TileInfo {
  float slope;  // 0 if there are no slopes.
};
template <typename Config>
using TileInfoOf = std::conditional_t<Config::kHasTerms, TermsTileInfo, TileInfo>;

// The slot that describes the tile of a stage of queries. With terms there is one stage but two
// slots: a slot is in use until all consumers have the queries of the next tile.
template <typename Config>
__device__ __forceinline__ int TileSlot(const RingPosition<Config::kQStages>& q_ring) {
  static_assert(!Config::kHasTerms || Config::kQStages == 1, "its phase tells tiles apart");
  return Config::kHasTerms ? q_ring.phase : q_ring.stage;
}

// A tile that the planner passes to the producer, while the producer still works on the previous
// one. num_blocks < 0: no more work.
struct PlannedTile : WorkItem {
  int32_t kv_head;
  int32_t log2_pack, num_packed;  // 2^log2_pack heads from `head` on, or fewer at the end.
};

template <typename Config>
struct ForwardShared : ForwardBias<Config, Config::kHasTerms> {
  static constexpr int kQStages = Config::kQStages;
  static constexpr int kKStages = Config::kKStages, kVStages = Config::kVStages;
  // TMA's 128-byte swizzle repeats every 1024 bytes.
  alignas(1024) typename Config::Element
      q[kQStages][Config::kQueriesByValues ? 8 : Config::kBlockM * Config::kHeadDim];
  alignas(1024) typename Config::Element k[kKStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) typename Config::Element v[kVStages][Config::kBlockN * Config::kValueDim];
  BlockInfo block[kKStages];
  TileInfoOf<Config> tile[Config::kHasTerms ? 2 : kQStages];
  PlannedTile planned;  // The next tile.
  PlannedTile item;     // Used only by the producer.
  // Calls with float32 or running results are stages of context parallelism, whose tiles may differ
  // a lot in weight. The instructions of other kernels stay the same.
  static constexpr bool kJoinsSections = Config::kIsOutFloat && !Config::kHasTerms;
  std::conditional_t<Config::kCutsKeys, KeyParts<Config::kClusterSize, kJoinsSections>, WholeWork>
      parts;
  // Barriers. The producer and its TMA bytes arrive on `full`, where consumers wait; consumers
  // arrive on `empty`, where the producer waits. For queries, the planner takes the producer's
  // place.
  uint64_t q_full[kQStages], q_empty[kQStages];
  uint64_t k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
  ClusterWork work;
  // The planner arrives on `full`, where the producer waits; the producer arrives on `empty` to
  // request the next tile. All lanes arrive, because all lanes write or read.
  uint64_t planned_full, planned_empty;
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_TILE_CUH_
