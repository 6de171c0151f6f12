// Stores accumulators to memory, in rows of 16-byte words.

#ifndef JAX_MAGI_CUDA_ATTENTION_STORE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_STORE_CUH_

#include "cc/cuda/attention/online_softmax.cuh"

namespace jax_magi::cuda {

// word[j] becomes word[t] of thread j of the quad.
__device__ __forceinline__ void TransposeQuad(uint32_t (&word)[4], int t) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(~0u, t & 1 ? word[i] : word[i + 1], 1);
    (t & 1 ? word[i] : word[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(~0u, t & 2 ? word[i] : word[i + 2], 2);
    (t & 2 ? word[i] : word[i + 2]) = got;
  }
}

// Writes the thread's two rows of an accumulator of kDim columns as Element, multiplied by
// `factor`. Skips columns from `num_columns` on, and rows where `is_own` is false.
//
// A quad holds 8 columns of a row, 2 per thread. Four such groups are transposed within the quad,
// so that each thread stores 16 bytes.
template <typename Element, int kDim>
__device__ __forceinline__ void StoreRows(const float (&acc)[kDim / 2], const float (&factor)[2],
                                          Element* const (&rows)[2], const bool (&is_own)[2],
                                          int num_columns, int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int first = 0; first < kDim / 8; first += 4) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = acc + 4 * (first + i) + 2 * r;
        word[i] = PackPair<Element>(pair[0] * factor[r], pair[1] * factor[r]);
      }
      TransposeQuad(word, t);
      const int column = 8 * (first + t);
      if (is_own[r] && column < num_columns) {
        *reinterpret_cast<uint4*>(rows[r] + column) =
            make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// The same in float32, where each thread stores the pairs of columns that it holds.
template <int kDim>
__device__ __forceinline__ void StoreFloatRows(const float (&acc)[kDim / 2],
                                               const float (&factor)[2], float* const (&rows)[2],
                                               const bool (&is_own)[2], int num_columns, int lane) {
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    const int column = 8 * i + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (is_own[r] && column < num_columns) {
        *reinterpret_cast<float2*>(rows[r] + column) =
            make_float2(acc[4 * i + 2 * r] * factor[r], acc[4 * i + 2 * r + 1] * factor[r]);
      }
    }
  }
}

// Multiplies the thread's two rows of an accumulator by `factor`, and adds `rows` multiplied by
// `running_factor`. With kIsOrdered, the compiler keeps the order of loads: it may otherwise move
// more of them ahead than registers hold.
template <int kDim, bool kIsOrdered>
__device__ __forceinline__ void MergeFloatRows(float (&acc)[kDim / 2], const float (&factor)[2],
                                               const float (&running_factor)[2],
                                               const float* const (&rows)[2],
                                               const bool (&is_own)[2], int num_columns, int lane) {
  // All rows are loaded before anything is stored, or the loads would wait for the stores. A chunk
  // is as much as registers hold.
  constexpr int kColumns = kDim < 128 ? kDim : 128;
#pragma unroll
  for (int first = 0; first < kDim; first += kColumns) {
    if constexpr (kIsOrdered) __syncwarp();
    float2 running[kColumns / 8][2];
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      const int column = first + 8 * i + 2 * (lane % 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        running[i][r] = make_float2(0.0f, 0.0f);
        if (is_own[r] && column < num_columns) {
          running[i][r] = *reinterpret_cast<const float2*>(rows[r] + column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* pair = acc + first / 2 + 4 * i + 2 * r;
        pair[0] = pair[0] * factor[r] + running[i][r].x * running_factor[r];
        pair[1] = pair[1] * factor[r] + running[i][r].y * running_factor[r];
      }
    }
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_STORE_CUH_
