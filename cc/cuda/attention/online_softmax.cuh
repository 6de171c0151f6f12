// Online softmax over a score tile in wgmma's accumulator layout.
//
// A thread of a warpgroup holds two rows, lane / 4 and lane / 4 + 8 of its warp's 16. Element i of
// its accumulator belongs to row (i / 2) % 2 and column 8 * (i / 4) + 2 * (lane % 4) + i % 2.

#ifndef JAX_MAGI_CUDA_ATTENTION_ONLINE_SOFTMAX_CUH_
#define JAX_MAGI_CUDA_ATTENTION_ONLINE_SOFTMAX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cc/cuda/arithmetic.cuh"
#include "cc/cuda/attention/element.h"
#include "cc/mask.h"

namespace jax_magi::cuda {

// Accurate to about 1e-7 absolute: tanh.approx would cost fp16 its last bits.
__device__ __forceinline__ float Tanh(float x) {
  return 1.0f - 2.0f * Reciprocal(Exp2(2.0f * kLog2E * x) + 1.0f);
}

__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float QuadMax(float x) {
  x = MaxOrNan(x, __shfl_xor_sync(~0u, x, 1));
  return MaxOrNan(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <typename Element>
__device__ __forceinline__ uint32_t PackPair(float a, float b);

template <>
__device__ __forceinline__ uint32_t PackPair<bfloat16_t>(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ __forceinline__ uint32_t PackPair<half_t>(float a, float b) {
  const __half2 pair = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename Element>
__device__ __forceinline__ float2 UnpackPair(uint32_t pair);

template <>
__device__ __forceinline__ float2 UnpackPair<bfloat16_t>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

template <>
__device__ __forceinline__ float2 UnpackPair<half_t>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

template <typename Element>
__device__ __forceinline__ float ToFloat(Element x) {
  return UnpackPair<Element>(x.bits).x;
}

template <>
__device__ __forceinline__ float ToFloat<float>(float x) {
  return x;
}

// Sets masked scores to -inf. `rows` are the thread's rows, and `key` is the tile's first key plus
// the thread's first column.
template <int kCount>
__device__ __forceinline__ void HideScores(const Slice& slice, const int (&rows)[2], int key,
                                           float (&scores)[kCount]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = rows[r];
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

// The parameters of a softmax.
struct SoftmaxScale {
  float log2;         // Scores to exponents of 2: softmax_scale * log2(e), or softcap * log2(e).
  float inverse_cap;  // softmax_scale / softcap, if there is a cap.
};

// -0 counts as negative; a NaN that arithmetic produces does not.
template <int kCount>
__device__ __forceinline__ bool IsAnyNegative(const float (&x)[kCount]) {
  int bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits |= __float_as_int(x[i]);
  return bits < 0;
}

// tanh of a score, or -inf where the score is masked. Branch-free.
__device__ __forceinline__ float Cap(float score, const SoftmaxScale& scale) {
  const float tanh = Tanh(score * scale.inverse_cap);
  return score == -INFINITY ? score : tanh;
}

// The running state of a row's softmax. Exponents are relative to a reference, the row's maximum at
// some earlier time: as long as no score is far above the reference, nothing needs to be rescaled.
struct RowState {
  float reference[2];  // An exponent; the same in all threads that share the row.
  float max[2];        // The uncapped maximum, of only this thread's columns until the end.
  float sum[2];        // The sum of only this thread's columns until the end.
};

// The reference of a row that has not seen any key yet: finite, because -inf - -inf would be NaN.
constexpr float kNoReference = -3e38f;

// Probabilities reach up to 2^kSlack before the reference moves, which is far from any overflow,
// even in fp16.
constexpr float kSlack = 8.0f;

// The maximum over this thread's columns; NaN if any score is NaN.
template <int kCount>
__device__ __forceinline__ void ThreadMax(const float (&scores)[kCount], float (&max)[2]) {
  constexpr int kChains = 4;  // Independent chains hide the latency of FMNMX.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float partial[kChains];
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float pair = MaxOrNan(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]);
      partial[i % kChains] = i < kChains ? pair : MaxOrNan(partial[i % kChains], pair);
    }
    static_assert(kCount / 4 >= kChains, "all chains are used");
    max[r] = MaxOrNan(MaxOrNan(partial[0], partial[1]), MaxOrNan(partial[2], partial[3]));
  }
}

// Turns scores into probabilities relative to the reference. Returns whether the reference moved in
// some row of the warp: all sums so far must then be multiplied by `correction`.
template <bool kHasSoftcap, int kCount>
__device__ __forceinline__ bool OnlineSoftmax(const SoftmaxScale& scale, RowState& state,
                                              float (&scores)[kCount], float (&correction)[2]) {
  float max[2];
  ThreadMax(scores, max);
#pragma unroll
  for (int r = 0; r < 2; ++r) state.max[r] = MaxOrNan(state.max[r], max[r]);
  if constexpr (kHasSoftcap) {
#pragma unroll
    for (float& score : scores) score = Cap(score, scale);
    ThreadMax(scores, max);
  }
  bool is_far = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) is_far |= !(max[r] * scale.log2 - state.reference[r] <= kSlack);
  const bool has_moved = __any_sync(~0u, is_far);
  if (has_moved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float old = state.reference[r];
      state.reference[r] = MaxOrNan(old, QuadMax(max[r]) * scale.log2);
      correction[r] = Exp2(old - state.reference[r]);
      state.sum[r] *= correction[r];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int r = i / 2 % 2;
    scores[i] = Exp2(scores[i] * scale.log2 - state.reference[r]);
    state.sum[r] += scores[i];
  }
  return has_moved;
}

// Packs probabilities as the register operand of wgmma.
template <typename Element, int kCount>
__device__ __forceinline__ void PackProbabilities(const float (&scores)[kCount],
                                                  uint32_t (&p)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    p[i] = PackPair<Element>(scores[2 * i], scores[2 * i + 1]);
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_ONLINE_SOFTMAX_CUH_
