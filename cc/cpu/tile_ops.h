// Float32 tile arithmetic: matrix product, transpose, and copies of rows from and to memory.
//
// Everything has internal linkage, as in vector.h.

#ifndef JAX_MAGI_CPU_TILE_OPS_H_
#define JAX_MAGI_CPU_TILE_OPS_H_

#include "cc/cpu/convert.h"
#include "cc/cpu/vector.h"

namespace jax_magi::cpu {
namespace {

// A block of C in registers: kBlockRows rows of two vectors.
#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int kBlockRows = 4;  // 16 registers: 8 accumulators, and 12 would not divide a tile.
#elif defined(__SSE2__) && !defined(__AVX__)
constexpr int kBlockRows = 4;
#else
constexpr int kBlockRows = 8;  // 32 registers (NEON, AVX-512): 16 accumulators.
#endif
constexpr int kBlockCols = 2 * kLanes;

JAX_MAGI_INLINE int RoundDown(int x, int step) { return x / step * step; }
JAX_MAGI_INLINE int RoundUp(int x, int step) { return (x + step - 1) / step * step; }

// C[row][col] = (kAccumulate ? C : 0) + sum over `depth` of A[i][row] * B[i][col].
//
// A is stored depth-major, so that both operands are read contiguously. `cols` must be a multiple
// of kBlockCols; rows are rounded up to kBlockRows, so A and C must hold that many.
template <bool kAccumulate>
void MatMul(int rows, int cols, int depth, const float* __restrict a, int64_t lda,
            const float* __restrict b, int64_t ldb, float* __restrict c, int64_t ldc) {
  for (int col = 0; col < cols; col += kBlockCols) {
    for (int row = 0; row < rows; row += kBlockRows) {
      Vec acc[kBlockRows][2];
#pragma GCC unroll 8
      for (int r = 0; r < kBlockRows; ++r) {
        const float* c_row = c + (row + r) * ldc + col;
        acc[r][0] = kAccumulate ? Load(c_row) : Vec{};
        acc[r][1] = kAccumulate ? Load(c_row + kLanes) : Vec{};
      }
      const float* a_i = a + row;
      const float* b_i = b + col;
      for (int i = 0; i < depth; ++i, a_i += lda, b_i += ldb) {
        const Vec b0 = Load(b_i);
        const Vec b1 = Load(b_i + kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kBlockRows; ++r) {
          acc[r][0] += a_i[r] * b0;
          acc[r][1] += a_i[r] * b1;
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kBlockRows; ++r) {
        float* c_row = c + (row + r) * ldc + col;
        Store(c_row, acc[r][0]);
        Store(c_row + kLanes, acc[r][1]);
      }
    }
  }
}

// dst[col][row] = src[row][col]. Both counts are rounded up to 4, so both buffers must hold that
// many.
void Transpose(int rows, int cols, const float* __restrict src, int64_t ld_src,
               float* __restrict dst, int64_t ld_dst) {
  typedef float Vec4 __attribute__((vector_size(16)));
  for (int col = 0; col < cols; col += 4) {
    for (int row = 0; row < rows; row += 4) {
      Vec4 x[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) std::memcpy(&x[r], src + (row + r) * ld_src + col, 16);
      const Vec4 ab_lo = Vec4{x[0][0], x[1][0], x[0][1], x[1][1]};
      const Vec4 ab_hi = Vec4{x[0][2], x[1][2], x[0][3], x[1][3]};
      const Vec4 cd_lo = Vec4{x[2][0], x[3][0], x[2][1], x[3][1]};
      const Vec4 cd_hi = Vec4{x[2][2], x[3][2], x[2][3], x[3][3]};
      const Vec4 y[4] = {Vec4{ab_lo[0], ab_lo[1], cd_lo[0], cd_lo[1]},
                         Vec4{ab_lo[2], ab_lo[3], cd_lo[2], cd_lo[3]},
                         Vec4{ab_hi[0], ab_hi[1], cd_hi[0], cd_hi[1]},
                         Vec4{ab_hi[2], ab_hi[3], cd_hi[2], cd_hi[3]}};
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) std::memcpy(dst + (col + r) * ld_dst + row, &y[r], 16);
    }
  }
}

// Copies `rows` rows of `dim` elements to float32, times `factor`. Pads each row with zeros to
// `ld_dst`, and adds zero rows up to `padded_rows`.
template <typename T>
void LoadRows(const T* __restrict src, int64_t stride, int rows, int64_t dim, int padded_rows,
              float factor, float* __restrict dst, int64_t ld_dst) {
  for (int row = 0; row < rows; ++row) {
    const T* src_row = src + row * stride;
    float* dst_row = dst + row * ld_dst;
    for (int64_t i = 0; i < dim; ++i) dst_row[i] = ToFloat(src_row[i]) * factor;
    for (int64_t i = dim; i < ld_dst; ++i) dst_row[i] = 0.0f;
  }
  std::memset(dst + rows * ld_dst, 0, sizeof(float) * (padded_rows - rows) * ld_dst);
}

// Writes `dim` floats times `factor`.
template <typename T>
JAX_MAGI_INLINE void StoreRow(const float* __restrict src, int64_t dim, float factor,
                              T* __restrict dst) {
  for (int64_t i = 0; i < dim; ++i) dst[i] = FromFloat<T>(src[i] * factor);
}

}  // namespace
}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_TILE_OPS_H_
