// mma.sync: matrix products of a warp, with operands and results in registers.
//
// A piece of an operand is 16 x 16 elements, in four words of each thread. A result is 16 x 8
// floats, four in each thread: element i belongs to row lane / 4 + 8 * (i / 2) and column
// 2 * (lane % 4) + i % 2, as in online_softmax.cuh. Results of 16 rows by n columns are arrays of
// n / 2 floats: columns from 8 * i on begin at 4 * i.
//
// shared_tile.cuh loads operands from shared memory. A result becomes a left operand in registers:
// PackPair of neighbouring floats gives the four words of 16 columns in order (PackProbabilities).

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_MMA_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_MMA_CUH_

#include <cstdint>
#include <type_traits>

#include "cc/cuda/attention/element.h"

namespace jax_magi::cuda::sm80 {

// c[16, 8] += a[16, 16] * b[16, 8].
template <typename Element>
__device__ __forceinline__ void Multiply(const uint32_t* a, const uint32_t* b, float* c) {
  if constexpr (std::is_same_v<Element, bfloat16_t>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<Element, half_t>, "an element type of 16 bits");
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// sums(g)[16, 16] += a[g][16, 16] * b[16, 16], for several pieces a[g] with the same b.
template <typename Element, typename Piece, int kPieces, typename Sums>
__device__ __forceinline__ void MultiplyPieces(const Piece (&a)[kPieces], const uint32_t (&b)[4],
                                               Sums sums) {
#pragma unroll
  for (int g = 0; g < kPieces; ++g) {
    Multiply<Element>(a[g], b, sums(g));
    Multiply<Element>(a[g], b + 2, sums(g) + 4);
  }
}

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_MMA_CUH_
