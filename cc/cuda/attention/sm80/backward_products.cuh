// What the backward kernel's warps compute in more than one place.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_PRODUCTS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_PRODUCTS_CUH_

#include <cmath>

#include "cc/cuda/attention/sm80/mma.cuh"
#include "cc/cuda/attention/sm80/shared_tile.cuh"

namespace jax_magi::cuda::sm80 {

// The derivative of a cap, from the tanh that it is made of, or from -inf, for a hidden score.
__device__ __forceinline__ float CapSlope(float tanh) {
  return tanh == -INFINITY ? 0.0f : 1.0f - tanh * tanh;
}

// c[keys, queries] += keys * queries^T, over all dims. Dims that `keys` does not have are in
// `last_dims`: left operands of 16 keys and 16 dims.
template <typename Element, int kKeyDim, int kDim, int kLast, int kPieces, int kCount>
__device__ __forceinline__ void MultiplyDimsOfKeys(int lane, SharedTile<kKeyDim> keys,
                                                   SharedTile<kDim> queries,
                                                   const uint32_t (&last_dims)[kPieces][kLast][4],
                                                   float (&c)[kPieces][kCount]) {
  static_assert(kKeyDim + 16 * kLast >= kDim);
  const LeftRows<kKeyDim> left(keys, lane);
  const RightRows<kDim> right(queries, lane);
#pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    uint32_t a[kPieces][4];
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
      if (d < kKeyDim) {
        left.Load(16 * m, d, a[m]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[m][j] = last_dims[m][(d - kKeyDim) / 16][j];
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kCount; i += 16) {
      uint32_t b[4];
      right.Load(i, d, b);
      MultiplyPieces<Element>(a, b, [&](int m) { return c[m] + i / 2; });
    }
  }
}

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_PRODUCTS_CUH_
