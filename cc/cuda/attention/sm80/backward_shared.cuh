// The shared memory of the backward kernel, its barriers, and its stores of dK and dV.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_SHARED_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_SHARED_CUH_

#include "cc/cuda/attention/sm80/backward_block_terms.cuh"
#include "cc/cuda/attention/sm80/backward_config.h"
#include "cc/cuda/attention/sm80/backward_params.cuh"
#include "cc/cuda/attention/sm80/shared_tile.cuh"
#include "cc/cuda/attention/store.cuh"

namespace jax_magi::cuda::sm80 {

template <typename Config>
struct BackwardShared {
  using Element = typename Config::Element;
  // Tiles of shared_tile.cuh.
  alignas(1024) Element k[Config::kKeys * Config::kHeadDim];
  Element v[Config::kKeys * Config::kSharedValueDim];  // The others are in registers.
  Element q[Config::kQStages][Config::kQueries * Config::kHeadDim];
  Element dout[Config::kDoStages][Config::kQueries * Config::kValueDim];
  // dS, a row per key. Before that, the warps that share keys exchange probabilities there. If
  // warps have roles, probabilities have the first stage, and dS the second.
  Element ds[Config::kDsStages][Config::kKeys * Config::kQueries];
  QueryStatistic statistics[Config::kQStages][Config::kQueries / 8];
  KeySums<Config::kHasTerms ? Config::kSplit : 0, Config::kKeys> key_sums;
  // The block before, the current one, the next one, and the one after it, which the walk writes.
  BlockInfo block[4];
  BlockWalk<Config::kKeys, Config::kQueries> walk;
};

// Named barriers. Barrier 0 is that of __syncthreads().
enum BackwardBarrier {
  // The first of one per group of warps that share keys: they have written probabilities or dS, or
  // have read probabilities.
  kGroupBarrier = 1,
  // The others, if warps have roles.
  kFirstRole = 1,   // All of the first role: what they have copied or written is complete.
  kSecondRole = 2,  // The same for the second role.
  kPIsReady = 3,    // The first role arrives, once it has written probabilities; the second waits.
  kDoIsReady = 4,   // The second role arrives, once it has copied dO; the first waits.
};

// The thread's index, read again at each use. Kept in registers, what is derived from it would be
// live through the whole loop, and there are none to spare.
__device__ __forceinline__ int ThreadAnew() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int>(thread % 1024);  // Tells the compiler that it is not negative.
}

// Stores gradients of a tile's keys, or of its values.
template <typename Config>
struct KeyGradients {
  using Element = typename Config::Element;
  const BackwardParams& params;
  const BackwardShared<Config>& shared;
  void* out;
  int dim;
  float factor;

  // A warp's keys from `first_key` of the tile on, dims from `first_dim` on.
  template <int kDims, int kPieces>
  __device__ __forceinline__ void Store(const float (&acc)[kPieces][kDims / 2], int first_key,
                                        int first_dim, int lane) const {
    const Tile& tile = shared.walk.tile;
    const float factors[2] = {factor, factor};
    const int64_t batch = int64_t{shared.walk.PackInHead(params.walk)} * params.batch + tile.batch;
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
      bool is_own[2];
      int64_t offset[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_key + 16 * m + 8 * r + lane / 4;
        is_own[r] = row < tile.num_rows;
        const int64_t key = batch * params.k_len + tile.begin + row;
        offset[r] = (key * params.num_kv_heads + shared.walk.KvHead(params.walk)) * dim + first_dim;
      }
      if (params.is_float) {
        float* base = static_cast<float*>(out);
        float* const rows[2] = {base + offset[0], base + offset[1]};
        StoreFloatRows<kDims>(acc[m], factors, rows, is_own, dim - first_dim, lane);
      } else {
        Element* base = static_cast<Element*>(out);
        Element* const rows[2] = {base + offset[0], base + offset[1]};
        if constexpr (kDims % 32 == 0) {
          StoreRows<Element, kDims>(acc[m], factors, rows, is_own, dim - first_dim, lane);
        } else {
          // Rows are stored 32 dims at a time.
          constexpr int kPadded = kDims + 32 - kDims % 32;
          float padded[kPadded / 2];
#pragma unroll
          for (int i = 0; i < kPadded / 2; ++i) padded[i] = i < kDims / 2 ? acc[m][i] : 0.0f;
          StoreRows<Element, kPadded>(padded, factors, rows, is_own, Min(dim - first_dim, kDims),
                                      lane);
        }
      }
    }
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_SHARED_CUH_
