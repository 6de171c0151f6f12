// Adds accumulators to sums in global memory.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_ADD_ROWS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_ADD_ROWS_CUH_

#include <cuda_runtime.h>

namespace jax_magi::cuda::sm90 {

// Adds `x` to four floats that are aligned to 16 bytes.
__device__ __forceinline__ void AddFour(float* sum, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sum), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// Like StoreFloatRows, but adds to the rows in memory.
//
// Neighbouring threads exchange halves of two groups of 8 columns, so that each thread adds 16
// bytes, and a quad 64 contiguous bytes.
template <int kDim>
__device__ __forceinline__ void AddFloatRows(const float (&acc)[kDim / 2], const float (&factor)[2],
                                             float* const (&rows)[2], const bool (&is_own)[2],
                                             int num_columns, int lane) {
  static_assert(kDim % 16 == 0, "groups come in pairs");
  const bool is_odd = lane % 2;
#pragma unroll
  for (int i = 0; i < kDim / 8; i += 2) {
    const int column = 8 * (i + lane % 2) + 4 * (lane % 4 / 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* first = acc + 4 * i + 2 * r;
      const float* second = first + 4;
      float kept[2], got[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        kept[j] = (is_odd ? second[j] : first[j]) * factor[r];
        got[j] = __shfl_xor_sync(~0u, (is_odd ? first[j] : second[j]) * factor[r], 1);
      }
      if (is_own[r] && column < num_columns) {
        AddFour(rows[r] + column, is_odd ? make_float4(got[0], got[1], kept[0], kept[1])
                                         : make_float4(kept[0], kept[1], got[0], got[1]));
      }
    }
  }
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_ADD_ROWS_CUH_
