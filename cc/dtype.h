// Element types that the kernels take.

#ifndef JAX_MAGI_DTYPE_H_
#define JAX_MAGI_DTYPE_H_

namespace jax_magi {

enum class DType { kF32, kBF16, kF16 };

constexpr int ElementBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

}  // namespace jax_magi

#endif  // JAX_MAGI_DTYPE_H_
