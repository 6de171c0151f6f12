// The terms of a block's scores in the backward kernel, and their gradients.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_BLOCK_TERMS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_BLOCK_TERMS_CUH_

#include "cc/cuda/attention/sm90/backward_block.cuh"

namespace jax_magi::cuda::sm90 {

template <typename Config>
struct BackwardBlockTerms {
  using Element = typename Config::Element;
  static constexpr int kColumns = Config::kBlockColumns;
  BackwardBlock<Config>& block;

  __device__ __forceinline__ BackwardTermsParams const& params() const { return block.params; }
  __device__ __forceinline__ BackwardShared<Config>& shared() const { return block.shared; }

  // 0 if there are no slopes.
  __device__ __forceinline__ float Slope(int batch, int head) const {
    const float* slopes = params().terms.slopes;
    return slopes == nullptr ? 0.0f : slopes[int64_t{batch} * params().num_q_heads + head];
  }

  // Turns products into scores in natural units, with their terms. The bias is where dS will be,
  // once `full` has completed the phase.
  __device__ __forceinline__ void Add(int stage, Element* ds, uint64_t* full,
                                      uint32_t phase) const {
    const ScoreTerms& terms = params().terms;
    if constexpr (Config::kIsBiasAlone) {
      AddTiles(ds, full, phase);
      return;
    }
    const int batch = block.Tile().batch, head = shared().target[stage].head;
    const int key = block.Tile().begin + block.RowAnew();
    const int distance = key - (shared().block[stage].begin + 2 * (block.thread % 4));
    float factor = params().softmax_scale;
    const float slope = Slope(batch, head);
    float base[2] = {slope * distance, slope * (distance + 8)};
    if constexpr (Config::kAreSlopesAlone) {
      AddSlopes(factor, -slope, base, block.scores);
      return;
    }
    if (terms.kind == BiasKind::kByKey) {
      const int64_t first = terms.Offset(batch, head) + key;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (key + 8 * r < params().work.num_rows) base[r] += terms.Load<Element>(first + 8 * r);
      }
    } else if (terms.kind == BiasKind::kTiles) {
      AddTiles(ds, full, phase);
      factor = 1.0f;
    } else if (terms.kind == BiasKind::kFloat) {
      AddStagedHalf<0>(stage, ds);
      AddStagedHalf<1>(stage, ds);
      factor = 1.0f;
    }
    const bool is_scaled = terms.kind == BiasKind::kTiles || terms.kind == BiasKind::kFloat;
    if (!is_scaled || terms.slopes != nullptr) AddSlopes(factor, -slope, base, block.scores);
  }

  // Adds a bias that was loaded by TMA.
  __device__ __forceinline__ void AddTiles(Element* ds, uint64_t* full, uint32_t phase) const {
    Wait(full, phase);
    const Element* address = block.DsMatrices(ds);
    AddPackedBias<Element>(params().softmax_scale, block.scores, [&](int step, uint32_t* x) {
      LoadMatricesTransposed(address + step * 16 * 64, x);
    });
  }

  // Adds half of a float32 bias, because there is no room for more. A warp's keys of one query take
  // two of the rows that dS will have.
  template <int kPart>
  __device__ __forceinline__ void AddStagedHalf(int stage, Element* ds) const {
    constexpr int kHalf = kColumns / 2;
    static_assert(kHalf % 8 == 0, "half a block is whole matrices");
    const ScoreTerms& terms = params().terms;
    const unsigned thread = RereadThreadIndex() % unsigned{kWarpgroup}, lane = thread % 32,
                   warp = thread / 32;
    const auto staged = [&](unsigned query, unsigned key) {  // Within the warp's 16 keys.
      const unsigned row = 2 * query + key / 8, chunk = 2 * warp + key / 4 % 2;
      Element* panel = ds + block.RowPart() * 64 * kColumns;
      return reinterpret_cast<float*>(panel + row * 64 + (chunk ^ (row % 8)) * 8) + key % 4;
    };
    const int key = block.Tile().begin + block.RowPart() * 64 + int(warp * 16 + lane % 16);
    const int first = shared().block[stage].begin + kPart * kHalf;
    const float* source = static_cast<const float*>(terms.bias) +
                          terms.Offset(block.Tile().batch, shared().target[stage].head) +
                          (first + int(lane / 16)) * terms.q_stride + key;
    __syncwarp();  // All lanes have read the previous half.
#pragma unroll 1
    for (int i = 0; i < kHalf; i += 2, source += 2 * terms.q_stride) {
      const int query = i + int(lane / 16);
      const bool is_inside = key < params().work.num_rows && first + query < params().q_len;
      CopyWord(staged(query, lane % 16), source, is_inside);
    }
    WaitForCopies();
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* bias = staged(2 * (lane % 4) + e % 2, lane / 4 + 8 * (e / 2));
#pragma unroll
      for (int i = 0; i < kHalf / 8; ++i) {
        float& score = block.scores[kPart * kHalf / 2 + 4 * i + e];
        score = score * params().softmax_scale + bias[i * 16 * 32];  // 16 rows of 32 words.
      }
    }
  }

  // Adds this block's part to the gradients of terms in memory, from dS, which is in place of dP.
  __device__ __forceinline__ void AddGradients(int stage) const {
    if constexpr (!Config::kHasAnyTerms) return;
    const TermGradients& gradients = params().gradients;
    const bool has_sums = gradients.key_sums != nullptr || gradients.key_moments != nullptr;
    if (!has_sums && gradients.dbias_sums == nullptr) return;
    const float* ds = block.dp;
    const int batch = block.Tile().batch, head = shared().target[stage].head;
    const int key = block.Tile().begin + block.RowAnew();
    const int query = shared().block[stage].begin + 2 * (block.thread % 4);
    const int end = block.Tile().begin + block.Tile().num_rows;
    if (has_sums) {
      float sum[2] = {0.0f, 0.0f}, moment[2] = {0.0f, 0.0f};
      block.ForEachPair([&](int e, int i, int r) {
        sum[r] += ds[2 * e] + ds[2 * e + 1];
        moment[r] -= ds[2 * e] * (8 * i) + ds[2 * e + 1] * (8 * i + 1);
      });
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        moment[r] = QuadSum(moment[r] + sum[r] * (key + 8 * r - query));
        sum[r] = QuadSum(sum[r]);
        if (block.thread % 4 != 0 || key + 8 * r >= end) continue;
        const int64_t offset =
            (int64_t{batch} * params().num_q_heads + head) * params().work.num_rows + key + 8 * r;
        if (gradients.key_sums != nullptr) atomicAdd(gradients.key_sums + offset, sum[r]);
        if (gradients.key_moments != nullptr) atomicAdd(gradients.key_moments + offset, moment[r]);
      }
    }
    if (gradients.dbias_sums != nullptr) {
      const int64_t stride = params().terms.q_stride;
      float* first =
          gradients.dbias_sums + params().terms.Offset(batch, head) + query * stride + key;
      block.ForEachPair([&](int e, int i, int r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (key + 8 * r < end && query + 8 * i + c < params().q_len) {
            atomicAdd(first + (8 * i + c) * stride + 8 * r, ds[2 * e + c]);
          }
        }
      });
    }
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_BLOCK_TERMS_CUH_
