// What the producer and the consumers of the forward kernel share.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_TILE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_TILE_CUH_

#include "cc/attention.h"
#include "cc/cuda/attention/score_terms.cuh"
#include "cc/cuda/attention/sm90/config.h"
#include "cc/cuda/attention/sm90/hopper.cuh"
#include "cc/cuda/attention/sm90/join_parts.cuh"
#include "cc/cuda/attention/sm90/pipeline.cuh"

namespace jax_magi::cuda {

// A tile of few rows holds those of several query heads of a kv head, 2^log2_pack: its row i is row
// i >> log2_pack of head i % 2^log2_pack. It holds as many as fit, but no more than all need.
template <typename Config>
JAX_MAGI_INLINE int Log2Pack(int num_rows, int group) {
  if constexpr (Config::kHasTerms) return 0;  // Heads have terms of their own.
  int log2_pack = 0;
  const auto fits = [&](int pack) {
    return Config::kBlockM % pack == 0 && num_rows * pack <= Config::kBlockM;
  };
  while ((1 << log2_pack) < group && fits(2 << log2_pack)) ++log2_pack;
  return log2_pack;
}

struct ForwardParams {
  // By how much log2_pack is above that of a tile with all rows: shorter ones, at the ends of
  // slices, pack more.
  static constexpr int kNumPacks = 3;
  CUtensorMap q_map[kNumPacks], k_map, v_map;
  WorkParams work;
  int q_len, num_q_heads, group, value_dim;
  int log2_pack, packs_per_kv_head;  // Of a tile with all rows.
  float softmax_scale, softcap;
  const float* sink;
  void* out;
  float *lse, *max_logits;
  PartsParams parts;
  // Used by kernels with a float32 output: see ForwardArgs, and whether this call rounds to `out`.
  const float* running_out;  // What results are merged with, or null.
  bool is_rounded;
  bool keeps_rows;  // Each row sees keys in one call only; the others leave it unchanged.
};

// The same, of a call with terms.
struct ForwardTermsParams : ForwardParams {
  CUtensorMap bias_map;
  ScoreTerms terms;
  bool is_out_float;
};
template <typename Config>
using ForwardParamsOf = std::conditional_t<Config::kHasTerms, ForwardTermsParams, ForwardParams>;

// Whether a bias that is the same for all queries is copied as it is: blocks of it are then whole
// 16 bytes, in memory too.
__device__ __forceinline__ bool KeyBiasIsCopied(const ForwardTermsParams& params) {
  return params.work.num_columns % kPositionAlignment == 0;
}

// Shared memory for a bias, block by block with the keys.
template <typename Config, bool kHasTerms>
struct ForwardBias {};
template <typename Config>
struct ForwardBias<Config, true> {
  // [panel of 64 keys][row][64 keys], as TMA writes it.
  alignas(1024) typename Config::Element
      bias[Config::kBiasStages][Config::kHasBiasBlocks ? Config::kBlockM * Config::kBlockN : 8];
  // Of a bias that is the same for all queries: float32, or its own elements as KeyBiasIsCopied
  // says.
  alignas(16) float key_bias[Config::kBiasStages][Config::kHasBiasBlocks ? 4 : Config::kBlockN];
  // Like those of keys. One that is the same for all queries is given back by all threads, as they
  // read words of it, and written by all lanes of the producer unless it is copied.
  uint64_t bias_full[Config::kBiasStages], bias_empty[Config::kBiasStages];
};

// One query tile of one head, or of several packed. num_blocks < 0: no more work.
struct alignas(16) TileInfo {
  int32_t batch, head, num_heads, log2_pack, begin, num_rows, num_blocks;
  int32_t part;  // As WorkItem says.
};
struct TermsTileInfo : TileInfo {
  float slope;  // 0 where there are none.
};
template <typename Config>
using TileInfoOf = std::conditional_t<Config::kHasTerms, TermsTileInfo, TileInfo>;

// Where the tile of a stage of queries is described. With terms there is one stage, but two of
// these: one is in use until all consumers have the queries of the next tile.
template <typename Config>
__device__ __forceinline__ int TileSlot(const RingPosition<Config::kQStages>& q_ring) {
  static_assert(!Config::kHasTerms || Config::kQStages == 1, "its phase tells tiles apart");
  return Config::kHasTerms ? q_ring.phase : q_ring.stage;
}

// A tile as the planner hands it to the producer, while that one is still at the tile before.
// num_blocks < 0: no more work.
struct PlannedTile : WorkItem {
  int32_t kv_head;
  int32_t log2_pack, num_packed;  // Heads from `head` on: 2^log2_pack, as far as there are any.
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
  PlannedTile planned;  // The next one.
  PlannedTile item;     // The producer's own.
  std::conditional_t<Config::kCutsKeys, KeyParts<Config::kClusterSize>, WholeWork> parts;
  // Barriers. On `full`, the producer arrives and its bytes do, and consumers wait; on `empty`,
  // consumers arrive and the producer waits. Of queries, the planner in its place.
  uint64_t q_full[kQStages], q_empty[kQStages];
  uint64_t k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
  ClusterWork work;
  // The planner arrives on `full`, and the producer waits; on `empty`, it asks for the next. With
  // all lanes, as all write or read.
  uint64_t planned_full, planned_empty;
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_TILE_CUH_
