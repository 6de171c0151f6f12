// The terms of a block's scores in the forward kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_BLOCK_TERMS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_BLOCK_TERMS_CUH_

#include "cc/cuda/attention/score_terms.cuh"
#include "cc/cuda/attention/sm80/forward_tile.cuh"

namespace jax_magi::cuda::sm80 {

// For a thread that has two rows, `row` and row + 8, and of each 8 keys from `begin` on the pair
// from key `begin` on: `begin` includes the thread's first column.
template <typename Config>
struct ForwardBlockTerms {
  using Element = typename Config::Element;
  static constexpr int kBlockN = Config::kBlockN;
  const ForwardTermsParams& params;
  const TileInfo& tile;
  int row, begin;

  __device__ __forceinline__ int64_t Offset() const {
    return params.terms.Offset(tile.batch, tile.head);
  }
  __device__ __forceinline__ bool HasKey(int key) const {
    return static_cast<unsigned>(key) < static_cast<unsigned>(params.k_len);
  }

  // Starts to read a bias in tiles, as packed pairs: word i of 16 keys belongs to row 8 * (i % 2)
  // and key 8 * (i / 2). Rows are multiples of 8 keys, and so is `begin` without the thread's
  // column: both keys of a pair are in the array, or none.
  __device__ __forceinline__ void Read(uint32_t (&bias)[kBlockN / 4]) const {
    const ScoreTerms& terms = params.terms;
    if (terms.kind != BiasKind::kTiles) return;
    const auto* from = static_cast<const Element*>(terms.bias) + Offset() + row * terms.q_stride;
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) {
      const int key = begin + i / 2 * 8, r = i % 2 * 8;
      bias[i] = 0;
      if (row + r < params.q_len && HasKey(key)) {
        bias[i] = __ldg(reinterpret_cast<const uint32_t*>(from + r * terms.q_stride + key));
      }
    }
  }

  // Turns products into scores with their terms, up to the factor and offset in `logit`.
  __device__ __forceinline__ void Add(const uint32_t (&bias)[kBlockN / 4], float slope,
                                      LogitScale& logit, float (&scores)[kBlockN / 2]) const {
    const ScoreTerms& terms = params.terms;
    float step = slope;
    logit.factor = 1.0f;
    logit.offset[0] = logit.offset[1] = 0.0f;
    if (terms.kind == BiasKind::kTiles) {
      AddPackedBias<Element>(params.softmax_scale, scores, [&](int i, uint32_t* x) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = bias[4 * i + j];
      });
    } else if (terms.kind != BiasKind::kNone) {
      AddElements(scores);
    } else {
      logit.factor = params.softmax_scale;
      step *= terms.inverse_scale;
    }
    if (terms.slopes != nullptr) {
      AddSteps(step, scores);
      logit.offset[0] = slope * static_cast<float>(begin - row);
      logit.offset[1] = slope * static_cast<float>(begin - row - 8);
    }
  }

 private:
  // Adds any bias, which is read element by element. Its q_stride is 0 if it is the same for all
  // queries.
  __device__ __forceinline__ void AddElements(float (&scores)[kBlockN / 2]) const {
    const ScoreTerms& terms = params.terms;
    const int64_t offset = Offset() + row * terms.q_stride;
    AddBias(params.softmax_scale, scores, [&](int i, int r, float (&x)[2]) {
      const bool has_row = row + 8 * r < params.q_len;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = begin + 8 * i + e;
        x[e] = has_row && HasKey(key)
                   ? terms.template Load<Element>(offset + 8 * r * terms.q_stride + key)
                   : 0.0f;
      }
    });
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_BLOCK_TERMS_CUH_
