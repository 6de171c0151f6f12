// Fast approximate float arithmetic of the hardware.

#ifndef JAX_MAGI_CUDA_ARITHMETIC_CUH_
#define JAX_MAGI_CUDA_ARITHMETIC_CUH_

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

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ARITHMETIC_CUH_
