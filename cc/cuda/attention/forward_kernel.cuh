// The Hopper forward kernel: one block of threads finishes one (query tile, head) at a time, over
// all slices that touch it.
//
// One producer warp walks the slices and streams key tiles ("blocks") through a ring of shared
// memory, each with what the mask hides in it; consumer warpgroups hold 64 query rows each, and
// know nothing of slices. Blocks of threads share nothing but a work counter and, in a cluster, the
// loads of keys and values, so the result is deterministic.

#ifndef JAX_MAGI_CUDA_ATTENTION_FORWARD_KERNEL_CUH_
#define JAX_MAGI_CUDA_ATTENTION_FORWARD_KERNEL_CUH_

#include "cc/attention.h"
#include "cc/cuda/attention/config.h"
#include "cc/cuda/attention/hopper.cuh"
#include "cc/cuda/attention/online_softmax.cuh"
#include "cc/cuda/attention/pipeline.cuh"
#include "cc/cuda/attention/store.cuh"

namespace jax_magi::cuda {

// A tile of few rows holds those of several query heads of a kv head, 2^log2_pack: its row i is row
// i >> log2_pack of head i % 2^log2_pack. It holds as many as fit, but no more than all need.
template <typename Config>
JAX_MAGI_INLINE int Log2Pack(int num_rows, int group) {
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
};

// One query tile of one head, or of several packed. num_blocks < 0: no more work.
struct alignas(16) TileInfo {
  int32_t batch, head, num_heads, log2_pack, begin, num_rows, num_blocks;
};

template <typename Config>
struct ForwardShared {
  static constexpr int kQStages = Config::kQStages;
  static constexpr int kKStages = Config::kKStages, kVStages = Config::kVStages;
  // TMA's 128-byte swizzle repeats every 1024 bytes.
  alignas(1024) typename Config::Element q[kQStages][Config::kBlockM * Config::kHeadDim];
  alignas(1024) typename Config::Element k[kKStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) typename Config::Element v[kVStages][Config::kBlockN * Config::kValueDim];
  BlockInfo block[kKStages];
  TileInfo tile[kQStages];
  WorkItem item;       // The producer's own.
  uint32_t next_work;  // From the cluster's first block of threads to the others.
  // Barriers. On `full`, the producer arrives and its bytes do, and consumers wait; on `empty`,
  // consumers arrive and the producer waits.
  uint64_t q_full[kQStages], q_empty[kQStages];
  uint64_t k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
  // Of next_work: the cluster's first producer arrives, and the second waits; and the other way.
  uint64_t work_full, work_empty;
};

// --- Producer: one warp ---

template <typename Config>
struct Producer {
  using Shared = ForwardShared<Config>;
  static constexpr int kClusterSize = Config::kClusterSize;
  const ForwardParams& params;
  Shared& shared;
  int lane;
  RingPosition<Config::kKStages> k_ring;
  RingPosition<Config::kVStages> v_ring;
  RingPosition<Config::kQStages> q_ring;

  __device__ __forceinline__ void Run() {
    if constexpr (kClusterSize == 1) {
      ForEachWork(params.work, lane, shared.item, [&] { LoadTile(); });
    } else {
      ForEachWork(
          params.work, lane, shared.item, blockIdx.x / kClusterSize, [&] { LoadTile(); },
          [&] { NextWork(); });
    }
    Wait(&shared.q_empty[q_ring.stage], q_ring.phase ^ 1);
    if (lane == 0) {
      shared.tile[q_ring.stage].num_blocks = -1;
      Arrive(&shared.q_full[q_ring.stage]);
    }
  }

  // Sets the number of the cluster's next work. Its blocks of threads do the same in the same
  // order, as they wait for each other's keys.
  __device__ __forceinline__ void NextWork() {
    const uint32_t phase = shared.item.num_done % 2;
    __syncwarp();
    // Lanes wait together: ptxas schedules the consumers' loop badly if one does alone.
    if (ClusterRank() == 0) {
      WaitForCluster(&shared.work_empty, phase ^ 1);
      if (lane == 0) {
        shared.item.number =
            gridDim.x / kClusterSize + atomicAdd(&params.work.counter->next_work, 1);
        StoreAt(&shared.next_work, 1, shared.item.number);
        ArriveAt(&shared.work_full, 1);
      }
    } else {
      WaitForCluster(&shared.work_full, phase);
      if (lane == 0) {
        shared.item.number = *const_cast<const volatile uint32_t*>(&shared.next_work);
        ArriveAt(&shared.work_empty, 0);
      }
    }
  }

  __device__ __forceinline__ int Rank() const {
    if constexpr (kClusterSize == 1) return 0;
    return ClusterRank();
  }

  __device__ __forceinline__ void LoadTile() {
    const int more = MorePacked(), log2_pack = params.log2_pack + more;
    // The first of the cluster's heads.
    const int first = (shared.item.pack % params.packs_per_kv_head * kClusterSize)
                      << params.log2_pack;
    __syncwarp();
    if (lane == 0 && first % (kClusterSize << log2_pack) != 0) {  // Packed with heads before these.
      // It is not left out here, as any other path through this function makes ptxas schedule the
      // consumers' loop badly.
      shared.item.tile.num_rows = shared.item.tile.num_blocks = shared.item.tile.slice_end = 0;
    }
    __syncwarp();
    const int stage = q_ring.stage;
    Wait(&shared.q_empty[stage], q_ring.phase ^ 1);
    q_ring.Advance();
    if (lane == 0) {
      const Tile& tile = shared.item.tile;
      const int in_group = first + (Rank() << log2_pack);
      // In a cluster there may be none left: it then works in vain, for its part of the keys.
      const int head = KvHead() * params.group +
                       (kClusterSize == 1 ? in_group : Min(in_group, params.group - 1));
      const int num_heads = Min(1 << log2_pack, params.group - in_group);
      shared.tile[stage] = {tile.batch, head,          num_heads,      log2_pack,
                            tile.begin, tile.num_rows, tile.num_blocks};
      if (tile.num_blocks > 0) {
        ArriveExpectBytes(&shared.q_full[stage], sizeof(shared.q[stage]));
#pragma unroll
        for (int d = 0; d < Config::kHeadDim; d += 64) {
          LoadBox(&params.q_map[more], &shared.q_full[stage], shared.q[stage] + d * Config::kBlockM,
                  d, head, tile.begin, tile.batch);
        }
      } else {
        Arrive(&shared.q_full[stage]);
      }
    }
    LoadBlocks();
  }

  // How far the tile's log2_pack is above that of one with all rows.
  __device__ __forceinline__ int MorePacked() const {
    const int most =
        Log2Pack<Config>(shared.item.tile.num_rows, params.group / kClusterSize) - params.log2_pack;
    return Min(most, ForwardParams::kNumPacks - 1);
  }

  __device__ __forceinline__ int KvHead() const {
    return shared.item.pack / params.packs_per_kv_head;
  }

  __device__ __forceinline__ void LoadBlocks() {
    const Tile& tile = shared.item.tile;
    int remaining = tile.num_blocks;
    int v_row = 0;  // v follows k by one block: scores come first.
    ForEachSlice</*kByKeys=*/false>(params.work, tile, lane, [&](int slice, Range keys) {
      // From right to left, so that under a causal mask the diagonal comes first.
      for (; keys.begin < keys.end; keys.end -= Config::kBlockN) {
        const bool is_first = remaining == tile.num_blocks;
        --remaining;
        LoadKeys(slice, keys.end - Config::kBlockN, remaining == 0);
        if (!is_first) LoadValues(v_row);
        v_row = keys.end - Config::kBlockN;
      }
    });
    if (tile.num_blocks > 0) LoadValues(v_row);
  }

  __device__ __forceinline__ void LoadKeys(int slice_index, int begin, bool is_last) {
    const int stage = k_ring.stage;
    Wait(&shared.k_empty[stage], k_ring.phase ^ 1);
    if (lane == 0) {
      const Tile& tile = shared.item.tile;
      const Slice slice = LoadTileSlice</*kByKeys=*/false>(params.work, tile, slice_index);
      const bool is_clean = IsClean(slice, tile, begin, Config::kBlockN);
      shared.block[stage] = {slice, begin, (is_clean ? 0 : kMasked) | (is_last ? kLast : 0)};
      ArriveExpectBytes(&shared.k_full[stage], sizeof(shared.k[stage]));
      LoadPanels<Config::kHeadDim>(params.k_map, &shared.k_full[stage], shared.k[stage], begin);
    }
    k_ring.Advance();
  }

  __device__ __forceinline__ void LoadValues(int row) {
    const int stage = v_ring.stage;
    Wait(&shared.v_empty[stage], v_ring.phase ^ 1);
    if (lane == 0) {
      ArriveExpectBytes(&shared.v_full[stage], sizeof(shared.v[stage]));
      LoadPanels<Config::kValueDim>(params.v_map, &shared.v_full[stage], shared.v[stage], row);
    }
    v_ring.Advance();
  }

  // A block of keys or values. In a cluster, each block of threads loads a panel for all.
  template <int kDim>
  __device__ __forceinline__ void LoadPanels(const CUtensorMap& map, uint64_t* barrier,
                                             typename Config::Element* dst, int row) {
    if constexpr (kClusterSize == 1) {
#pragma unroll
      for (int d = 0; d < kDim; d += 64) {
        LoadBox(&map, barrier, dst + d * Config::kBlockN, d, KvHead(), row, shared.item.tile.batch);
      }
    } else {
      const int d = 64 * Rank();
      LoadBoxForRanks(&map, barrier, dst + d * Config::kBlockN, (1 << kClusterSize) - 1, d,
                      KvHead(), row, shared.item.tile.batch);
    }
  }
};

// --- Consumer: a warpgroup with 64 rows ---

template <typename Config>
struct Consumer {
  using Element = typename Config::Element;
  using Shared = ForwardShared<Config>;
  static constexpr int kBlockN = Config::kBlockN;

  const ForwardParams& params;
  Shared& shared;
  int warpgroup;  // Which consumer warpgroup.
  int thread;     // In the warpgroup.
  SoftmaxScale scale;
  RingPosition<Config::kKStages> k_ring;
  RingPosition<Config::kVStages> v_ring;
  RingPosition<Config::kQStages> q_ring;

  uint32_t q[Config::kQInRegisters ? Config::kHeadDim / 4 : 1];
  float scores[kBlockN / 2];
  uint32_t p[kBlockN / 4];
  float acc[Config::kValueDim / 2];
  RowState state;

  __device__ __forceinline__ void Run() {
    if constexpr (Config::kHasSoftcap) {
      scale = {params.softcap * kLog2E, params.softmax_scale / params.softcap};
    } else {
      scale = {params.softmax_scale * kLog2E, 0.0f};
    }
    while (true) {
      Wait(&shared.q_full[q_ring.stage], q_ring.phase);
      const TileInfo tile = shared.tile[q_ring.stage];
      if (tile.num_blocks < 0) return;
      Compute(tile);
      if (tile.num_rows > 0) Store(tile);
    }
  }

  // This thread's row `r`, 0 or 1, in shared memory; with heads packed, rows interleave them.
  __device__ __forceinline__ int PackedRow(int r) const {
    return warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
  }

  __device__ __forceinline__ void ReleaseQueries() {
    Arrive(&shared.q_empty[q_ring.stage]);
    q_ring.Advance();
  }

  __device__ __forceinline__ void Compute(const TileInfo& tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.reference[r] = kNoReference;
      state.max[r] = -INFINITY;
      state.sum[r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) acc[i] = 0.0f;
    if (tile.num_blocks == 0) return ReleaseQueries();
    if constexpr (Config::kQInRegisters) {
      LoadQueries();
      ReleaseQueries();
    }

    float correction[2];
    WaitForKeys();
    IssueScores();
    int flags = BlockFlags();
    WaitWgmma<0>();
    FinishScores(tile, flags);
    OnlineSoftmax<Config::kHasSoftcap>(scale, state, scores, correction);
    PackProbabilities<Element>(scores, p);

    // The next block's scores are computed while this one's probabilities meet their values, and
    // its softmax runs under that product.
    if (!(flags & kLast)) WaitForKeys();
    while (!(flags & kLast)) {
      IssueScores();
      flags = BlockFlags();
      Wait(&shared.v_full[v_ring.stage], v_ring.phase);
      IssueValues();
      WaitWgmma<1>();
      FinishScores(tile, flags);
      // Asked before the softmax, as the answer takes its time; and the branch after it keeps ptxas
      // from moving the softmax behind the wait for the product.
      const bool has_keys = (flags & kLast) || IsDone(&shared.k_full[k_ring.stage], k_ring.phase);
      const bool has_moved = OnlineSoftmax<Config::kHasSoftcap>(scale, state, scores, correction);
      if (!has_keys) WaitForKeys();
      WaitWgmma<0>();
      FinishValues();
      if (has_moved) Rescale(correction);
      PackProbabilities<Element>(scores, p);
    }
    if constexpr (!Config::kQInRegisters) ReleaseQueries();
    Wait(&shared.v_full[v_ring.stage], v_ring.phase);
    IssueValues();
    WaitWgmma<0>();
    FinishValues();
  }

  // As wgmma wants them: 16 rows of the warp, 16 dims a step.
  __device__ __forceinline__ void LoadQueries() {
    const int row = warpgroup * 64 + thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
      const int chunk = 2 * (step % 4) + thread % 32 / 16;
      const Element* panel = shared.q[q_ring.stage] + step / 4 * Config::kBlockM * 64;
      LoadMatrices(panel + row * 64 + (chunk ^ (row % 8)) * 8, q + 4 * step);
    }
  }

  __device__ __forceinline__ void WaitForKeys() {
    Wait(&shared.k_full[k_ring.stage], k_ring.phase);
  }

  __device__ __forceinline__ void IssueScores() {
    constexpr uint32_t kPanel = 64 * sizeof(Element);
    FenceRegisters(scores);
    FenceWgmma();
    const uint64_t keys = RowDescriptor<Config::kClusterSize>(shared.k[k_ring.stage]);
    if constexpr (Config::kQInRegisters) {
      MultiplyRegisterRowsKeys<Element, kBlockN, Config::kHeadDim>(q, keys, kBlockN * kPanel,
                                                                   scores);
    } else {
      MultiplyRowsKeys<Element, kBlockN, Config::kHeadDim>(
          RowDescriptor<Config::kClusterSize>(shared.q[q_ring.stage] + warpgroup * 64 * 64),
          Config::kBlockM * kPanel, keys, kBlockN * kPanel, scores);
    }
    CommitWgmma();
  }

  __device__ __forceinline__ void IssueValues() {
    FenceRegisters(acc);
    FenceWgmma();
    MultiplyProbabilitiesValues<Element, kBlockN, Config::kValueDim>(
        p,
        ColumnDescriptor<Config::kClusterSize>(shared.v[v_ring.stage],
                                               kBlockN * 64 * sizeof(Element)),
        acc);
    CommitWgmma();
  }

  __device__ __forceinline__ int BlockFlags() const {
    return LoadByWarp(shared.block[k_ring.stage].flags);
  }

  // The scores have arrived: hides what the mask hides, and gives the keys back.
  __device__ __forceinline__ void FinishScores(const TileInfo& tile, int flags) {
    FenceRegisters(scores);
    if (flags & kMasked) {
      const BlockInfo info = LoadByWarp(shared.block[k_ring.stage]);
      const int rows[2] = {tile.begin + (PackedRow(0) >> tile.log2_pack),
                           tile.begin + (PackedRow(1) >> tile.log2_pack)};
      HideScores(info.slice, rows, info.begin + 2 * (thread % 4), scores);
    }
    ArriveByWarpAtAll<Config::kClusterSize>(&shared.k_empty[k_ring.stage], thread);
    k_ring.Advance();
  }

  __device__ __forceinline__ void FinishValues() {
    FenceRegisters(acc);
    ArriveByWarpAtAll<Config::kClusterSize>(&shared.v_empty[v_ring.stage], thread);
    v_ring.Advance();
  }

  __device__ __forceinline__ void Rescale(const float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) acc[i] *= correction[i / 2 % 2];
  }

  // --- Epilogue: straight from registers to memory ---

  __device__ __forceinline__ void Store(const TileInfo& tile) {
    WaitForPreviousKernel();  // It resets max_logits.
    float max[2], factor[2];
    int64_t offset[2];  // Of (batch, row, head) in [batch, q_len, num_q_heads].
    bool is_own[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = PackedRow(r) >> tile.log2_pack;
      const int in_pack = PackedRow(r) & ((1 << tile.log2_pack) - 1);
      is_own[r] = row < tile.num_rows && in_pack < tile.num_heads;
      const int head = tile.head + (is_own[r] ? in_pack : 0);
      offset[r] =
          (int64_t{tile.batch} * params.q_len + tile.begin + row) * params.num_q_heads + head;
      const int64_t batch_head = int64_t{tile.batch} * params.num_q_heads + head;
      const float sink = kLog2E * params.sink[batch_head];
      const float sum = QuadSum(state.sum[r]);
      const float reference = state.reference[r] == kNoReference ? -INFINITY : state.reference[r];
      const float largest = fmaxf(reference, sink);
      const float weight = largest == -INFINITY ? 0.0f : Exp2(reference - largest);
      const float total = sum * weight + (largest == -INFINITY ? 0.0f : Exp2(sink - largest));
      factor[r] = total == 0.0f ? 0.0f : weight * Reciprocal(total);
      if (is_own[r] && thread % 4 == 0) {
        params.lse[offset[r]] = total == 0.0f ? -INFINITY : (largest + __log2f(total)) * kLn2;
      }
      max[r] = QuadMax(is_own[r] ? state.max[r] : -INFINITY);
      if (tile.log2_pack > 0 && thread % 4 == 0) {
        ReportMaxLogit(max[r], params.max_logits + batch_head);
      }
    }
    if (tile.log2_pack == 0) {
      float largest = MaxOrNan(max[0], max[1]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        largest = MaxOrNan(largest, __shfl_xor_sync(~0u, largest, lanes));
      }
      const int64_t batch_head = int64_t{tile.batch} * params.num_q_heads + tile.head;
      if (thread % 32 == 0) ReportMaxLogit(largest, params.max_logits + batch_head);
    }
    if constexpr (Config::kIsOutFloat) {
      float* out = static_cast<float*>(params.out);
      float* const rows[2] = {out + offset[0] * params.value_dim,
                              out + offset[1] * params.value_dim};
      StoreFloatRows<Config::kValueDim>(acc, factor, rows, is_own, params.value_dim, thread);
    } else {
      Element* out = static_cast<Element*>(params.out);
      Element* const rows[2] = {out + offset[0] * params.value_dim,
                                out + offset[1] * params.value_dim};
      StoreRows<Element, Config::kValueDim>(acc, factor, rows, is_own, params.value_dim, thread);
    }
  }

  __device__ __forceinline__ void ReportMaxLogit(float largest, float* destination) {
    if (largest == -INFINITY) return;
    // As integers, floats of one sign are ordered; a positive NaN is above all others. A NaN logit
    // must not look like a healthy head, and -0 not like the least of all.
    const float value =
        isnan(largest) ? __int_as_float(0x7fc00000) : largest * params.softmax_scale + 0.0f;
    if (!(value < 0.0f)) {
      atomicMax(reinterpret_cast<int*>(destination), __float_as_int(value));
    } else {
      atomicMin(reinterpret_cast<unsigned*>(destination), __float_as_uint(value));
    }
  }
};

// Until no other block of threads needs this one's shared memory. In each role for itself: behind
// both, it makes ptxas schedule the consumers' loop badly.
template <typename Config>
__device__ __forceinline__ void WaitForClusterToEnd() {
  if constexpr (Config::kClusterSize > 1) ClusterSync();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    ForwardKernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<ForwardShared<Config>*>(memory);
  const int thread = threadIdx.x;
  if (thread == 0) {
    PrefetchTensorMap(&params.q_map[0]);
    PrefetchTensorMap(&params.k_map);
    PrefetchTensorMap(&params.v_map);
    constexpr int kConsumers = Config::kNumConsumers * kWarpgroup;
    InitRing(shared.q_full, shared.q_empty, 1, kConsumers);
    // Keys and values are written by all of the cluster, and given back to all.
    InitRing(shared.k_full, shared.k_empty, 1, Config::kClusterSize * kConsumers / 32);
    InitRing(shared.v_full, shared.v_empty, 1, Config::kClusterSize * kConsumers / 32);
    InitBarrier(&shared.work_full, 1);
    InitBarrier(&shared.work_empty, 1);
    FenceBarrierInit();
  }
  if constexpr (Config::kClusterSize == 1) {
    __syncthreads();
  } else {
    ClusterSync();  // Others arrive at these barriers, too.
  }

  if (thread < kWarpgroup) {
    GiveRegisters<Config::kProducerRegisters>();
    if (thread < 32) {
      Producer<Config>{params, shared, thread}.Run();
      WaitForClusterToEnd<Config>();
    }
  } else {
    TakeRegisters<Config::kConsumerRegisters>();
    // By a shuffle: the compiler then knows that it is the same for a whole warp.
    const int warpgroup = __shfl_sync(~0u, thread / kWarpgroup - 1, 0);
    Consumer<Config> consumer{params, shared, warpgroup, thread % kWarpgroup};
    consumer.Run();
    WaitForClusterToEnd<Config>();
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_FORWARD_KERNEL_CUH_
