// Online softmax over a score tile in wgmma's accumulator layout.
//
// A thread of a warpgroup holds two rows, lane / 4 and lane / 4 + 8 of its warp's 16. Element i of
// its accumulator belongs to row (i / 2) % 2 and column 8 * (i / 4) + 2 * (lane % 4) + i % 2.

#ifndef JAX_MAGI_CUDA_SOFTMAX_CUH_
#define JAX_MAGI_CUDA_SOFTMAX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cc/mask.h"
#include "cute/numeric/numeric_types.hpp"

namespace jax_magi::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To about 1e-7, absolutely: tanh.approx would cost fp16 its last bits.
__device__ __forceinline__ float Tanh(float x) {
  return 1.0f - 2.0f * Reciprocal(Exp2(2.0f * kLog2E * x) + 1.0f);
}

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <typename Element>
__device__ __forceinline__ uint32_t PackPair(float a, float b);

template <>
__device__ __forceinline__ uint32_t PackPair<cutlass::bfloat16_t>(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ __forceinline__ uint32_t PackPair<cutlass::half_t>(float a, float b) {
  const __half2 pair = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Sets scores that the slice hides to -inf. `row` is the thread's first row, `key` the tile's first
// key plus the thread's first column.
template <int kCount>
__device__ __forceinline__ void HideScores(const Slice& slice, int row, int key,
                                           float (&scores)[kCount]) {
#pragma unroll
  for (int r = 0; r < 2; ++r, row += 8) {
    const bool in_slice = slice.q_begin <= row && row < slice.q_end;
    const Range keys = in_slice ? VisibleKeys(slice, row) : Range{0, 0};
    const int begin = keys.begin - key;
    // One unsigned comparison tests both ends.
    const unsigned length = Max(keys.end - keys.begin, 0);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (static_cast<unsigned>(8 * i + e - begin) >= length)
          scores[4 * i + 2 * r + e] = -INFINITY;
      }
    }
  }
}

// What a row's softmax is about, besides its state.
struct SoftmaxScale {
  float log2;         // softmax_scale * log2(e), or softcap * log2(e): from scores to exponents.
  float inverse_cap;  // softmax_scale / softcap, if there is a cap.
};

struct RowState {
  float max[2];        // Of scores as they are exponentiated (capped, if there is a cap).
  float max_logit[2];  // Of scores before the cap; not kept without one.
  float sum[2];        // This thread's columns only, until the end.
};

template <int kCount>
__device__ __forceinline__ void RowMax(const float (&scores)[kCount], float (&max)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    max[r] = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
    for (int i = 1; i < kCount / 4; ++i) {
      max[r] = fmaxf(max[r], fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) max[r] = QuadMax(max[r]);
}

// Caps scores, and keeps the largest there was.
template <int kCount>
__device__ __forceinline__ void CapScores(const SoftmaxScale& scale, RowState& state,
                                          float (&scores)[kCount]) {
  float max[2];
  RowMax(scores, max);
#pragma unroll
  for (int r = 0; r < 2; ++r) state.max_logit[r] = fmaxf(state.max_logit[r], max[r]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (scores[i] != -INFINITY) scores[i] = Tanh(scores[i] * scale.inverse_cap);
  }
}

// Turns scores into probabilities under the running maximum. `correction` is what sums so far must
// be multiplied by.
template <bool kHasSoftcap, int kCount>
__device__ __forceinline__ void OnlineSoftmax(const SoftmaxScale& scale, RowState& state,
                                              float (&scores)[kCount], float (&correction)[2]) {
  if constexpr (kHasSoftcap) CapScores(scale, state, scores);
  float max[2], reference[2];
  RowMax(scores, max);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float old_max = state.max[r];
    state.max[r] = fmaxf(old_max, max[r]);
    // A row that has seen nothing: subtract 0, or -inf - -inf would make NaN.
    reference[r] = state.max[r] == -INFINITY ? 0.0f : state.max[r] * scale.log2;
    correction[r] = Exp2(old_max * scale.log2 - reference[r]);
    state.sum[r] *= correction[r];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = scores[4 * i + 2 * r + e];
        s = Exp2(s * scale.log2 - reference[r]);
        state.sum[r] += s;
      }
    }
  }
}

// Packs probabilities as wgmma's register operand.
template <typename Element, int kCount>
__device__ __forceinline__ void PackProbabilities(const float (&scores)[kCount],
                                                  uint32_t (&p)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    p[i] = PackPair<Element>(scores[2 * i], scores[2 * i + 1]);
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SOFTMAX_CUH_
