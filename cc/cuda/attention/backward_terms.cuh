// What the backward kernel does for scores with terms: a bias, ALiBi's slopes.
//
// A block of the bias is loaded to where dS will be written: each warp reads there what it
// overwrites. From there, a warp beside the producer carries dS to the bias's gradient, as far as
// pairs are visible; other gradients of terms are added to memory from registers, in float32.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_TERMS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_TERMS_CUH_

#include "cc/cuda/attention/hidden_pairs.cuh"
#include "cc/cuda/attention/hopper.cuh"
#include "cc/cuda/attention/pipeline.cuh"
#include "cc/cuda/attention/score_terms.cuh"
#include "cc/cuda/attention/term_gradients.h"

namespace jax_magi::cuda {

// Says to the warp that stores dS what it is. After the last one, `head` is negative.
struct alignas(16) DsInfo {
  BlockInfo block;
  int32_t head, batch, row_begin;
};

template <typename Config, bool kHasTerms>
struct BackwardBias {};
template <typename Config>
struct BackwardBias<Config, true> {
  // Where rows are queries: [panel of 64 keys][row][64 keys], as TMA writes it.
  alignas(1024) typename Config::Element
      bias[2][Config::kHasBiasStages ? Config::kBlockRows * Config::kBlockColumns : 64];
  DsInfo ds_info[Config::kDsStages];
  HiddenShared<(Config::kZeroShare > 0 ? 64 : 1)> hidden;
  bool has_hidden;       // Pairs, for which zeros are written.
  uint32_t num_workers;  // Blocks of threads that write none at first.
  // Of these stages, or of those of dS. The producer arrives on `full` with the bias, and consumers
  // wait; they, and all lanes of the warp that stores dS, arrive on `empty`, and the producer
  // waits.
  uint64_t bias_full[Config::kDsStages], ds_empty[Config::kDsStages];
};

// One warp: writes the dS of visible pairs to the gradient of the bias, in the order in which
// consumers write blocks of it to shared memory. It takes part in their barrier.
template <typename Config, typename Params, typename Shared>
struct DsStore {
  using Element = typename Config::Element;
  static constexpr int kColumns = Config::kBlockColumns;
  const Params& params;
  Shared& shared;
  int lane;

  __device__ __forceinline__ void Run(int barrier) {
    if constexpr (Config::kDqIsLate) {
      if (params.gradients.dbias != nullptr) {
        for (RingPosition<Config::kDsStages> ring;; ring.Advance()) {
          Wait(&shared.ds_full[ring.stage], ring.phase);
          if (shared.ds_info[ring.stage].head < 0) break;
          Store(ring.stage);
          Arrive(&shared.ds_empty[ring.stage]);
        }
      }
    } else {
      for (int stage = 0;; stage ^= 1) {
        NamedSync(barrier, Config::kDsThreads);
        if (shared.ds_info[stage].head < 0) break;
        if (params.gradients.dbias != nullptr) Store(stage);
        Arrive(&shared.ds_empty[stage]);
        __syncwarp();  // A warp comes to a named barrier as one.
      }
    }
    if (lane == 0) WaitReduce();
  }

  __device__ __forceinline__ void Store(int stage) {
    const DsInfo& info = shared.ds_info[stage];
    const Element* ds = shared.ds + stage * Config::kBlockRows * kColumns;
    if (info.block.flags & kMasked) {
      StoreVisible(info, ds);
    } else if (lane == 0) {
      StoreAll(info, ds);
    }
  }

  // Kept in registers, what is made of the index would be live through the whole loop.
  __device__ __forceinline__ static int LaneAnew() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }

  __device__ __forceinline__ void StoreAll(const DsInfo& info, const Element* ds) {
#pragma unroll
    for (int i = 0; i < Config::kBlockRows; i += 64) {
      StoreBoxOnce(&params.dbias_map, ds + i * kColumns, info.row_begin + i, info.block.begin,
                   info.head, info.batch);
    }
    CommitReduce();
    WaitReduceRead();
  }

  // Four keys a lane, query by query.
  __device__ __forceinline__ void StoreVisible(const DsInfo& info, const Element* ds) {
    static_assert(Config::kBlockRows == 128, "a warp has four keys a lane");
    const int lane = LaneAnew();
    const ScoreTerms& terms = params.terms;
    auto* row = static_cast<uint16_t*>(params.gradients.dbias) +
                terms.Offset(info.batch, info.head) + info.block.begin * terms.q_stride +
                info.row_begin + 4 * lane;
#pragma unroll 1
    for (int i = 0; i < kColumns; ++i, row += terms.q_stride) {
      const int query = info.block.begin + i;
      if (query < info.block.slice.k_begin || query >= info.block.slice.k_end) continue;
      const Range keys = VisibleRows(info.block.slice, query);
      // One unsigned comparison tests both ends.
      const unsigned first = info.row_begin + 4 * lane - keys.begin;
      const unsigned length = Max(keys.end - keys.begin, 0);
      const uint2 words = *reinterpret_cast<const uint2*>(
          ds + lane / 16 * 64 * kColumns + i * 64 + ((lane % 16 / 2) ^ (i % 8)) * 8 + lane % 2 * 4);
      if (Config::kIsBiasAlone && first < length && first + 3 < length) {
        *reinterpret_cast<uint2*>(row) = words;
        continue;
      }
      if (first < length) row[0] = words.x;
      if (first + 1 < length) row[1] = words.x >> 16;
      if (first + 2 < length) row[2] = words.y;
      if (first + 3 < length) row[3] = words.y >> 16;
    }
  }
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_TERMS_CUH_
