// How the backward kernel handles scores with terms: a bias, or ALiBi slopes.
//
// A block of the bias is loaded to where dS will be written: each warp reads there what it then
// overwrites. A dedicated warp of the producer's warpgroup copies dS from there to the gradient of
// the bias, for visible pairs. Other gradients of terms are added to memory from registers, in
// float32.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_TERMS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_TERMS_CUH_

#include "cc/cuda/attention/score_terms.cuh"
#include "cc/cuda/attention/sm90/hidden_pairs.cuh"
#include "cc/cuda/attention/sm90/hopper.cuh"
#include "cc/cuda/attention/sm90/pipeline.cuh"
#include "cc/cuda/attention/term_gradients.h"

namespace jax_magi::cuda::sm90 {

// Describes a dS to the warp that stores it. After the last dS, `head` is negative.
struct alignas(16) DsInfo {
  BlockInfo block;
  int32_t head, batch, row_begin;
};

template <typename Config, bool kBiasByTma>
struct BackwardBias {};
template <typename Config>
struct BackwardBias<Config, true> {
  DsInfo ds_info[Config::kDsStages];
  HiddenShared<(Config::kZeroShare > 0 ? 64 : 1)> hidden;
  bool has_hidden;       // Whether zeros are written for any hidden pairs.
  uint32_t num_workers;  // Number of CTAs that do not start with zeros.
  // One per stage of dS. The producer and its bytes of the bias arrive on `full`, where consumers
  // wait. Consumers, and all lanes of the warp that stores dS, arrive on `empty`, where the
  // producer waits.
  uint64_t bias_full[Config::kDsStages], ds_empty[Config::kDsStages];
};

// One warp that writes the dS of visible pairs to the gradient of the bias, in the order in which
// consumers write the blocks of dS to shared memory. The warp takes part in their barrier.
template <typename Config, typename Params, typename Shared>
struct DsStore {
  using Element = typename Config::Element;
  static constexpr int kColumns = Config::kBlockColumns;
  const Params& params;
  Shared& shared;

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
        __syncwarp();  // A warp must arrive at a named barrier as one.
      }
    }
    if (RereadLane() == 0) WaitReduce();
  }

  __device__ __forceinline__ void Store(int stage) {
#pragma unroll 1
    for (int i = 0; i < Config::kBlockRows; i += 64) {
      const DsInfo& info = shared.ds_info[stage];
      const Element* ds = shared.ds + (stage * Config::kBlockRows + i) * kColumns;
      const int key = info.row_begin + i;
      if ((info.block.flags & kMasked) &&
          !IsClean(info.block.slice, {key, key + 64}, info.block.begin, kColumns)) {
        StoreVisible(info, key, ds);
      } else if (RereadLane() == 0) {
        StoreBoxOnce(&params.dbias_map, ds, key, info.block.begin, info.head, info.batch);
        CommitReduce();
      }
    }
    if (RereadLane() == 0) WaitReduceRead();
  }

  // Stores 64 keys: eight per lane, four queries at a time.
  __device__ __forceinline__ void StoreVisible(const DsInfo& info, int first_key,
                                               const Element* ds) {
    const Slice& slice = info.block.slice;
    const ScoreTerms& terms = params.terms;
    const int key = first_key + 8 * (RereadLane() % 8);
    auto* row = static_cast<uint16_t*>(params.gradients.dbias) +
                terms.Offset(info.batch, info.head) +
                (info.block.begin + RereadLane() / 8) * terms.q_stride + key;
#pragma unroll 1
    for (int i = RereadLane() / 8; i < kColumns; i += 4, row += 4 * terms.q_stride) {
      const int query = info.block.begin + i;
      if (query < slice.k_begin || query >= slice.k_end) continue;
      const Range keys = VisibleRows(slice, query);
      const int begin = Max(keys.begin - key, 0), end = Min(keys.end - key, 8);
      const Element* source = ds + i * 64 + ((RereadLane() % 8) ^ (i % 8)) * 8;
      if (begin == 0 && end == 8) {
        *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(source);
        continue;
      }
#pragma unroll 1
      for (int e = begin; e < end; ++e) {
        row[e] = reinterpret_cast<const uint16_t*>(source)[e];
      }
    }
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_TERMS_CUH_
