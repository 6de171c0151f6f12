// The terms of a block's scores in the backward kernel, and their gradients.
//
// Threads read a bias from memory, element by element. Its gradient is stored from dS in shared
// memory, for visible pairs. Other gradients of terms are added to memory in float32.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_BLOCK_TERMS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_BLOCK_TERMS_CUH_

#include "cc/cuda/attention/sm80/backward_params.cuh"
#include "cc/cuda/attention/sm80/shared_tile.cuh"
#include "cc/cuda/attention/store.cuh"

namespace jax_magi::cuda::sm80 {

// Sums over a block's queries of dS, and of dS * (j - i), in shared memory: a share of the queries
// from each of the warps that share keys. One thread adds the shares of a key, so that the order of
// additions is fixed.
template <int kNumShares, int kNumKeys>
struct KeySums {
  float sum[kNumShares][kNumKeys], moment[kNumShares][kNumKeys];
};
template <int kNumKeys>
struct KeySums<0, kNumKeys> {};

// For a warp's keys and one chunk of queries.
template <typename Config>
struct BackwardBlockTerms {
  using Element = typename Config::Element;
  static constexpr int kChunk = Config::kChunk, kPieces = Config::kPieces;
  static constexpr int kGroupKeys = 16 * kPieces;
  using Scores = float[kPieces][kChunk / 2];
  using Sums = KeySums<Config::kSplit, Config::kKeys>;

  const BackwardTermsParams& params;
  const Tile& tile;
  const BlockInfo& info;
  int lane;
  int first_key, first_query;  // In the tile and in the block.

  // The thread's first key; others are at multiples of 8 after it.
  __device__ __forceinline__ int Key() const { return tile.begin + first_key + lane / 4; }
  // The thread's first query; others are at multiples of 8 after it, or at one more.
  __device__ __forceinline__ int Query() const { return info.begin + first_query + 2 * (lane % 4); }
  __device__ __forceinline__ int EndOfKeys() const { return tile.begin + tile.num_rows; }
  __device__ __forceinline__ int64_t Head() const {
    return int64_t{tile.batch} * params.num_q_heads + info.head;
  }

  // Calls fun(m, e, r, column) for each element e of 16 keys, which belongs to key 16 * m + 8 * r
  // and query `column` after the thread's first.
  template <typename Fun>
  __device__ __forceinline__ static void ForEach(Fun fun) {
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
#pragma unroll
      for (int e = 0; e < kChunk / 2; ++e) fun(m, e, e / 2 % 2, e / 4 * 8 + e % 2);
    }
  }

  // Turns products into scores in natural units, with their terms.
  __device__ __forceinline__ void Add(Scores& scores) const {
    const ScoreTerms& terms = params.terms;
    const float slope = terms.slopes == nullptr ? 0.0f : terms.slopes[Head()];
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
      const int distance = Key() + 16 * m - Query();
      const float base[2] = {slope * distance, slope * (distance + 8)};
      AddSlopes(params.softmax_scale, -slope, base, scores[m]);
    }
    if (terms.kind == BiasKind::kNone) return;
    if (terms.is_float) {
      AddBias(static_cast<const float*>(terms.bias), scores);
    } else {
      AddBias(static_cast<const Element*>(terms.bias), scores);
    }
  }

  // Adds the gradients of terms that are sums, from dS, to memory or to `sums`.
  __device__ __forceinline__ void AddGradients(const Scores& ds, Sums& sums, int share) const {
    const TermGradients& gradients = params.gradients;
    if (HasKeySums()) {
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
        float sum[2] = {0.0f, 0.0f}, moment[2] = {0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < kChunk / 2; ++e) {
          sum[e / 2 % 2] += ds[m][e];
          moment[e / 2 % 2] -= ds[m][e] * static_cast<float>(e / 4 * 8 + e % 2);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int in_group = 16 * m + 8 * r;
          const float distance = static_cast<float>(Key() + in_group - Query());
          const float all_moments = QuadSum(moment[r] + sum[r] * distance);
          const float all = QuadSum(sum[r]);
          if (lane % 4 == 0) {
            sums.sum[share][first_key + in_group + lane / 4] = all;
            sums.moment[share][first_key + in_group + lane / 4] = all_moments;
          }
        }
      }
    }
    if (gradients.dbias_sums != nullptr) {
      const int64_t stride = params.terms.q_stride;
      const int num_keys = EndOfKeys() - Key(), num_queries = params.q_len - Query();
      float* first = gradients.dbias_sums + params.terms.Offset(tile.batch, info.head) +
                     Query() * stride + Key();
      ForEach([&](int m, int e, int r, int column) {
        const int key = 16 * m + 8 * r;
        // Hidden pairs have no gradient.
        if (key < num_keys && column < num_queries && ds[m][e] != 0.0f) {
          atomicAdd(first + column * stride + key, ds[m][e]);
        }
      });
    }
  }

  // Adds the shares of sums by key to memory. Called by one of the warps that share keys.
  __device__ __forceinline__ void AddKeySums(const Sums& sums) const {
    if (!HasKeySums()) return;
    const TermGradients& gradients = params.gradients;
    const int in_tile = first_key + lane;
    if (lane >= kGroupKeys || in_tile >= tile.num_rows) return;
    float sum = 0.0f, moment = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kSplit; ++i) {
      sum += sums.sum[i][in_tile];
      moment += sums.moment[i][in_tile];
    }
    const int64_t offset = Head() * params.k_len + tile.begin + in_tile;
    if (gradients.key_sums != nullptr) atomicAdd(gradients.key_sums + offset, sum);
    if (gradients.key_moments != nullptr) atomicAdd(gradients.key_moments + offset, moment);
  }

  // Stores the visible pairs of dS in the gradient of a bias that is not shared. `ds` has a row per
  // key of the warp, and its columns are the block's queries. Keys of a tile, and rows of the bias,
  // begin at multiples of 16 bytes.
  template <typename DsTile>
  __device__ __forceinline__ void StoreDs(DsTile ds) const {
    constexpr int kKeyEights = kGroupKeys / 8, kNumMatrices = kKeyEights * kChunk / 8;
    static_assert(kNumMatrices % 4 == 0, "four at a time");
    const auto row_of = [&](int matrix) { return matrix % kKeyEights * 8; };
    const auto column_of = [&](int matrix) { return first_query + matrix / kKeyEights * 8; };
#pragma unroll 1
    for (int first = 0; first < kNumMatrices; first += 4) {
      uint32_t word[4];
      const int loaded = first + lane / 8;
      LoadMatricesTransposed(ds.PairAt(row_of(loaded) + lane % 8, column_of(loaded)), word);
      // The thread gets eight keys of one query.
      TransposeQuad(word, lane % 4);
      const int own = first + lane % 4;
      const int query = info.begin + column_of(own) + lane / 4;
      const int key = tile.begin + first_key + row_of(own);
      Range keys{0, 8};  // The visible ones.
      if (info.is_masked) {
        if (query < info.slice.k_begin || query >= info.slice.k_end) {
          keys.end = 0;
        } else {
          const Range visible = VisibleRows(info.slice, query);
          keys = {Max(visible.begin - key, 0), Min(visible.end - key, 8)};
        }
      }
      auto* to = static_cast<uint16_t*>(params.gradients.dbias) +
                 params.terms.Offset(tile.batch, info.head) + query * params.terms.q_stride + key;
      if (keys.begin == 0 && keys.end == 8) {
        __stcs(reinterpret_cast<uint4*>(to), make_uint4(word[0], word[1], word[2], word[3]));
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (keys.begin <= i && i < keys.end) {
            to[i] = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ bool HasKeySums() const {
    return params.gradients.key_sums != nullptr || params.gradients.key_moments != nullptr;
  }

  // Pairs outside the arrays are hidden.
  template <typename Bias>
  __device__ __forceinline__ void AddBias(const Bias* bias, Scores& scores) const {
    const int64_t stride = params.terms.q_stride;
    const int num_keys = EndOfKeys() - Key(), num_queries = params.q_len - Query();
    const Bias* first =
        bias + params.terms.Offset(tile.batch, info.head) + Query() * stride + Key();
    ForEach([&](int m, int e, int r, int column) {
      const int key = 16 * m + 8 * r;
      if (key < num_keys && column < num_queries) {
        scores[m][e] += ToFloat(first[column * stride + key]);
      }
    });
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_BLOCK_TERMS_CUH_
