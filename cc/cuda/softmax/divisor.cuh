#ifndef JAX_MAGI_CUDA_SOFTMAX_DIVISOR_CUH_
#define JAX_MAGI_CUDA_SOFTMAX_DIVISOR_CUH_

#include <cstdint>

namespace jax_magi::cuda {

// A divisor of 32-bit numbers. Multiplication is much faster than division on a GPU: with
// `multiplier` = 2^64 / divisor, rounded up, the quotient is exact, because the error is below
// 2^-32 of a divisor.
struct RowDivisor {
  uint32_t divisor;
  uint64_t multiplier;  // Unused if the divisor is 1.

  explicit RowDivisor(uint32_t divisor)
      : divisor(divisor), multiplier(divisor > 1 ? ~uint64_t{0} / divisor + 1 : 0) {}

  __device__ __forceinline__ uint32_t Divide(uint32_t a) const {
    return divisor == 1 ? a : static_cast<uint32_t>(__umul64hi(a, multiplier));
  }
  __device__ __forceinline__ uint32_t Modulo(uint32_t a) const { return a - Divide(a) * divisor; }
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SOFTMAX_DIVISOR_CUH_
