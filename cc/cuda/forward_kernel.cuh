// The Hopper forward kernel: one block of threads finishes one (query tile, head) at a time, over
// all slices that touch it.
//
// One producer warp walks the slices and streams key tiles ("blocks") through a ring of shared
// memory, each with what the mask hides in it; consumer warpgroups hold 64 query rows each, and
// know nothing of slices. Nothing is shared between blocks of threads but a work counter, so the
// result is deterministic.

#ifndef JAX_MAGI_CUDA_FORWARD_KERNEL_CUH_
#define JAX_MAGI_CUDA_FORWARD_KERNEL_CUH_

#include "cc/attention.h"
#include "cc/cuda/config.h"
#include "cc/cuda/hopper.cuh"
#include "cc/cuda/schedule.h"
#include "cc/cuda/softmax.cuh"

namespace jax_magi::cuda {

struct ForwardParams {
  CUtensorMap q_map, k_map, v_map;
  int q_len, k_len, num_q_heads, group, value_dim;
  int num_slices;
  bool shared_slices;
  int heads_per_section;  // Query heads worked on at once, so that their keys stay in L2.
  float softmax_scale, softcap;
  const Slice* slices;
  const float* sink;
  ScheduleHeader* schedule;
  void* out;
  float *lse, *max_logits;
};

// One key tile, as the producer hands it on.
struct alignas(16) BlockInfo {
  Slice slice;
  int32_t k_begin;
  int32_t flags;
};
enum BlockFlags { kMasked = 1, kLast = 2 };

// One query tile of one head. num_blocks < 0: no more work.
struct alignas(16) TileInfo {
  int32_t batch, head, q_begin, num_rows, num_blocks;
};

// Consumers take turns at the tensor cores: warpgroup i waits on kTurn + i, which its predecessor
// arrives at when it has issued its products.
enum NamedBarrier { kTurn = 1 };

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
  // full: the producer's arrival and its bytes. empty: one thread of every consumer warp.
  uint64_t q_full[kQStages], q_empty[kQStages];
  uint64_t k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
};

// Position in a ring of stages. The phase flips at each turn of the ring.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// --- Producer: one warp ---

template <typename Config>
struct Producer {
  using Shared = ForwardShared<Config>;
  const ForwardParams& params;
  Shared& shared;
  int lane;
  RingPosition<Config::kKStages> k_ring;
  RingPosition<Config::kVStages> v_ring;
  RingPosition<Config::kQStages> q_ring;

  __device__ __forceinline__ void Run() {
    int work = blockIdx.x;
    while (work < params.schedule->num_tiles * params.num_q_heads) {
      // Asked for early: the answer takes a trip to memory.
      int next_work = 0;
      if (lane == 0) next_work = gridDim.x + atomicAdd(&params.schedule->next_work, 1);
      LoadTile(work);
      work = __shfl_sync(~0u, next_work, 0);
    }
    Wait(&shared.q_empty[q_ring.stage], q_ring.phase ^ 1);
    if (lane == 0) {
      shared.tile[q_ring.stage].num_blocks = -1;
      Arrive(&shared.q_full[q_ring.stage]);
    }
  }

  __device__ __forceinline__ void LoadTile(int work) {
    const int per_section = params.schedule->num_tiles * params.heads_per_section;
    const int in_section = work % per_section;
    const int head =
        work / per_section * params.heads_per_section + in_section % params.heads_per_section;
    const QueryTile* tiles = reinterpret_cast<const QueryTile*>(params.schedule + 1);
    const QueryTile tile = tiles[in_section / params.heads_per_section];
    const int kv_head = head / params.group;

    const int stage = q_ring.stage;
    Wait(&shared.q_empty[stage], q_ring.phase ^ 1);
    q_ring.Advance();
    if (lane == 0) {
      shared.tile[stage] = {tile.batch, head, tile.q_begin, tile.num_rows, tile.num_blocks};
      if (tile.num_blocks > 0) {
        ArriveExpectBytes(&shared.q_full[stage], sizeof(shared.q[stage]));
#pragma unroll
        for (int d = 0; d < Config::kHeadDim; d += 64) {
          LoadBox(&params.q_map, &shared.q_full[stage], shared.q[stage] + d * Config::kBlockM, d,
                  head, tile.q_begin, tile.batch);
        }
      } else {
        Arrive(&shared.q_full[stage]);
      }
    }
    LoadBlocks(tile, kv_head);
  }

  // Lanes look at 32 slices at once; hits are worked off one by one.
  __device__ __forceinline__ void LoadBlocks(const QueryTile& tile, int kv_head) {
    const Slice* slices =
        params.slices + (params.shared_slices ? 0 : int64_t{tile.batch} * params.num_slices);
    const Range tile_rows{tile.q_begin, tile.q_begin + tile.num_rows};
    int remaining = tile.num_blocks;
    int v_row = 0;  // v follows k by one block: scores come first.
    for (int first = tile.slice_begin; first < tile.slice_end; first += 32) {
      Slice slice{};
      Range touched{0, 0}, clean{0, 0};
      if (first + lane < tile.slice_end) {
        slice = ClampSlice(slices[first + lane], params.q_len, params.k_len);
        const Range rows = Intersect(tile_rows, {slice.q_begin, slice.q_end});
        if (rows.begin < rows.end) {
          touched = TouchedKeys(slice, rows);
          // A tile that reaches past the slice is never clean.
          if (rows.begin == tile_rows.begin && rows.end == tile_rows.end) {
            clean = CleanKeys(slice, rows);
          }
        }
      }
      for (unsigned hits = __ballot_sync(~0u, touched.begin < touched.end); hits;
           hits &= hits - 1) {
        const int owner = __ffs(hits) - 1;
        const int keys_begin = __shfl_sync(~0u, touched.begin, owner);
        // From right to left, so that under a causal mask the diagonal comes first.
        for (int end = __shfl_sync(~0u, touched.end, owner); end > keys_begin;
             end -= Config::kBlockN) {
          const int k_begin = end - Config::kBlockN;
          const bool is_first = remaining == tile.num_blocks;
          --remaining;
          // The lane that owns the slice hands it on.
          const bool is_clean = clean.begin <= k_begin && end <= clean.end;
          const int flags = (is_clean ? 0 : kMasked) | (remaining == 0 ? kLast : 0);
          LoadKeys(lane == owner, {slice, k_begin, flags}, kv_head, tile.batch);
          if (!is_first) LoadValues(v_row, kv_head, tile.batch);
          v_row = k_begin;
        }
      }
    }
    if (tile.num_blocks > 0) LoadValues(v_row, kv_head, tile.batch);
  }

  __device__ __forceinline__ void LoadKeys(bool is_issuer, const BlockInfo& info, int kv_head,
                                           int batch) {
    const int stage = k_ring.stage;
    Wait(&shared.k_empty[stage], k_ring.phase ^ 1);
    if (is_issuer) {
      shared.block[stage] = info;
      ArriveExpectBytes(&shared.k_full[stage], sizeof(shared.k[stage]));
#pragma unroll
      for (int d = 0; d < Config::kHeadDim; d += 64) {
        LoadBox(&params.k_map, &shared.k_full[stage], shared.k[stage] + d * Config::kBlockN, d,
                kv_head, info.k_begin, batch);
      }
    }
    k_ring.Advance();
  }

  __device__ __forceinline__ void LoadValues(int row, int kv_head, int batch) {
    const int stage = v_ring.stage;
    Wait(&shared.v_empty[stage], v_ring.phase ^ 1);
    if (lane == 0) {
      ArriveExpectBytes(&shared.v_full[stage], sizeof(shared.v[stage]));
#pragma unroll
      for (int d = 0; d < Config::kValueDim; d += 64) {
        LoadBox(&params.v_map, &shared.v_full[stage], shared.v[stage] + d * Config::kBlockN, d,
                kv_head, row, batch);
      }
    }
    v_ring.Advance();
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
  int group;   // Which consumer warpgroup.
  int thread;  // In the warpgroup.
  SoftmaxScale scale;
  RingPosition<Config::kKStages> k_ring;
  RingPosition<Config::kVStages> v_ring;
  RingPosition<Config::kQStages> q_ring;

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
    // The first warpgroup's first turn.
    if (group == Config::kNumConsumers - 1) NamedArrive(kTurn, 2 * kWarpgroup);
    while (true) {
      Wait(&shared.q_full[q_ring.stage], q_ring.phase);
      const TileInfo tile = shared.tile[q_ring.stage];
      if (tile.num_blocks < 0) return;
      Compute(tile);
      Store(tile);
    }
  }

  // First row of this thread in the tile; its second is 8 further on.
  __device__ __forceinline__ int Row() const {
    return group * 64 + thread / 32 * 16 + thread % 32 / 4;
  }

  __device__ __forceinline__ void Release(uint64_t* barrier) {
    __syncwarp();
    if (thread % 32 == 0) Arrive(barrier);
  }

  __device__ __forceinline__ void ReleaseQueries() {
    Release(&shared.q_empty[q_ring.stage]);
    q_ring.Advance();
  }

  __device__ __forceinline__ void Compute(const TileInfo& tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) state.max[r] = state.max_logit[r] = -INFINITY, state.sum[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) acc[i] = 0.0f;
    if (tile.num_blocks == 0) return ReleaseQueries();

    float correction[2];
    WaitForKeys();
    IssueScores();
    WaitWgmma<0>();
    bool is_last = FinishScores(tile);
    OnlineSoftmax<Config::kHasSoftcap>(scale, state, scores, correction);
    PackProbabilities<Element>(scores, p);

    // The next block's scores are computed while this one's probabilities meet their values, and
    // its softmax runs under that product.
    if (!is_last) WaitForKeys();
    while (!is_last) {
      NamedSync(kTurn + group, 2 * kWarpgroup);
      IssueScores();
      Wait(&shared.v_full[v_ring.stage], v_ring.phase);
      IssueValues();
      NamedArrive(kTurn + (group + 1) % Config::kNumConsumers, 2 * kWarpgroup);
      WaitWgmma<1>();
      is_last = FinishScores(tile);
      OnlineSoftmax<Config::kHasSoftcap>(scale, state, scores, correction);
      // Here, as its loop keeps ptxas from moving the softmax behind the wait for the product.
      if (!is_last) WaitForKeys();
      WaitWgmma<0>();
      FinishValues();
      Rescale(correction);
      PackProbabilities<Element>(scores, p);
    }
    ReleaseQueries();
    Wait(&shared.v_full[v_ring.stage], v_ring.phase);
    IssueValues();
    WaitWgmma<0>();
    FinishValues();
  }

  __device__ __forceinline__ void WaitForKeys() {
    Wait(&shared.k_full[k_ring.stage], k_ring.phase);
  }

  __device__ __forceinline__ void IssueScores() {
    constexpr uint32_t kPanel = 64 * sizeof(Element);
    FenceRegisters(scores);
    FenceWgmma();
    MultiplyRowsKeys<Element, kBlockN, Config::kHeadDim>(
        RowDescriptor(shared.q[q_ring.stage] + group * 64 * 64), Config::kBlockM * kPanel,
        RowDescriptor(shared.k[k_ring.stage]), kBlockN * kPanel, scores);
    CommitWgmma();
  }

  __device__ __forceinline__ void IssueValues() {
    FenceRegisters(acc);
    FenceWgmma();
    MultiplyProbabilitiesValues<Element, kBlockN, Config::kValueDim>(
        p, ColumnDescriptor(shared.v[v_ring.stage], kBlockN * 64 * sizeof(Element)), acc);
    CommitWgmma();
  }

  // The scores have arrived: hides what the mask hides, and gives the keys back. Returns whether
  // the block is the tile's last.
  __device__ __forceinline__ bool FinishScores(const TileInfo& tile) {
    FenceRegisters(scores);
    const BlockInfo& info = shared.block[k_ring.stage];
    const int flags = info.flags;
    if (flags & kMasked) {
      HideScores(info.slice, tile.q_begin + Row(), info.k_begin + 2 * (thread % 4), scores);
    }
    Release(&shared.k_empty[k_ring.stage]);
    k_ring.Advance();
    return flags & kLast;
  }

  __device__ __forceinline__ void FinishValues() {
    FenceRegisters(acc);
    Release(&shared.v_empty[v_ring.stage]);
    v_ring.Advance();
  }

  __device__ __forceinline__ void Rescale(const float (&correction)[2]) {
    // Exactly 1 where the maximum did not move, as mostly it does not.
    if (!__any_sync(~0u, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) acc[i] *= correction[i / 2 % 2];
  }

  // --- Epilogue: straight from registers to memory ---

  __device__ __forceinline__ void Store(const TileInfo& tile) {
    const int64_t batch_head = int64_t{tile.batch} * params.num_q_heads + tile.head;
    const float sink = kLog2E * params.sink[batch_head];
    float largest = -INFINITY;
    float factor[2];
    int64_t offset[2];  // Of (batch, row, head) in [batch, q_len, num_q_heads].
    bool is_own[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = Row() + 8 * r;
      is_own[r] = row < tile.num_rows;
      offset[r] = (int64_t{tile.batch} * params.q_len + tile.q_begin + row) * params.num_q_heads +
                  tile.head;
      const float sum = QuadSum(state.sum[r]);
      const float row_max = state.max[r] == -INFINITY ? -INFINITY : state.max[r] * scale.log2;
      const float max = fmaxf(row_max, sink);
      const float weight = max == -INFINITY ? 0.0f : Exp2(row_max - max);
      const float total = sum * weight + (max == -INFINITY ? 0.0f : Exp2(sink - max));
      factor[r] = total == 0.0f ? 0.0f : weight * Reciprocal(total);
      if (is_own[r]) {
        if (thread % 4 == 0) {
          params.lse[offset[r]] = total == 0.0f ? -INFINITY : (max + __log2f(total)) * kLn2;
        }
        const float logit = Config::kHasSoftcap ? state.max_logit[r] : state.max[r];
        // The maximum skips NaN; the sum does not. A NaN logit must not look like a healthy head.
        largest = isnan(sum) || isnan(largest) ? NAN : fmaxf(largest, logit);
      }
    }
    ReportMaxLogit(largest, params.max_logits + batch_head);
    StoreOut(factor, offset, is_own);
  }

  __device__ __forceinline__ void ReportMaxLogit(float largest, float* destination) {
    const bool has_nan = __any_sync(~0u, isnan(largest));
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    if (thread % 32 != 0 || (largest == -INFINITY && !has_nan)) return;
    // As integers, floats of one sign are ordered; NaN is above all others.
    const float value = has_nan ? __int_as_float(0x7fc00000) : largest * params.softmax_scale;
    if (value >= 0.0f || has_nan) {
      atomicMax(reinterpret_cast<int*>(destination), __float_as_int(value));
    } else {
      atomicMin(reinterpret_cast<unsigned*>(destination), __float_as_uint(value));
    }
  }

  // A quad holds 8 columns of a row, 2 a thread. Four such groups are transposed among its threads,
  // so that each stores 16 bytes.
  __device__ __forceinline__ void StoreOut(const float (&factor)[2], const int64_t (&offset)[2],
                                           const bool (&is_own)[2]) {
    const int t = thread % 4;
    Element* out = static_cast<Element*>(params.out);
    const int value_dim = params.value_dim;
#pragma unroll
    for (int first = 0; first < Config::kValueDim / 8; first += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = acc + 4 * (first + i) + 2 * r;
          word[i] = PackPair<Element>(pair[0] * factor[r], pair[1] * factor[r]);
        }
        TransposeQuad(word, t);
        const int column = 8 * (first + t);
        if (is_own[r] && column < value_dim) {
          *reinterpret_cast<uint4*>(out + offset[r] * value_dim + column) =
              make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
    }
  }

  // word[j] becomes word[t] of thread j of the quad.
  __device__ __forceinline__ static void TransposeQuad(uint32_t (&word)[4], int t) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t got = __shfl_xor_sync(~0u, t & 1 ? word[i] : word[i + 1], 1);
      (t & 1 ? word[i] : word[i + 1]) = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t got = __shfl_xor_sync(~0u, t & 2 ? word[i] : word[i + 2], 2);
      (t & 2 ? word[i] : word[i + 2]) = got;
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    ForwardKernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<ForwardShared<Config>*>(memory);
  const int thread = threadIdx.x;
  if (thread == 0) {
    PrefetchTensorMap(&params.q_map);
    PrefetchTensorMap(&params.k_map);
    PrefetchTensorMap(&params.v_map);
    constexpr int kConsumerWarps = 4 * Config::kNumConsumers;
#pragma unroll
    for (int i = 0; i < Config::kQStages; ++i) {
      InitBarrier(&shared.q_full[i], 1);
      InitBarrier(&shared.q_empty[i], kConsumerWarps);
    }
#pragma unroll
    for (int i = 0; i < Config::kKStages; ++i) {
      InitBarrier(&shared.k_full[i], 1);
      InitBarrier(&shared.k_empty[i], kConsumerWarps);
    }
#pragma unroll
    for (int i = 0; i < Config::kVStages; ++i) {
      InitBarrier(&shared.v_full[i], 1);
      InitBarrier(&shared.v_empty[i], kConsumerWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();

  if (thread < kWarpgroup) {
    GiveRegisters<Config::kProducerRegisters>();
    if (thread < 32) Producer<Config>{params, shared, thread}.Run();
  } else {
    TakeRegisters<Config::kConsumerRegisters>();
    Consumer<Config> consumer{params, shared, thread / kWarpgroup - 1, thread % kWarpgroup};
    consumer.Run();
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_FORWARD_KERNEL_CUH_
