// The definition of one fused scale + mask + softmax call, for every device.
//
// With s = scale * x + mask over visible columns, and an offset z that acts as one more logit:
//
//   y = exp(s) / (sum of exp(s) + exp(z)),   offset_probability = exp(z) / (sum of exp(s) + exp(z))
//
// A column is visible if the band contains it and the boolean mask, if any, is true there. Fully
// masked rows, and rows whose scores are all -inf, return zeros.
// Backward: dot = sum of y * dy, dx = scale * y * (dy - dot).
//
// Layouts (row-major):
//   x, y, dy, dx              [batch, heads, q_len, k_len]
//   mask                      the same, or 1 in each dimension that is broadcast
//   offset                    [batch or 1, heads]
//   offset_probability, dot   [batch, heads, q_len]

#ifndef JAX_MAGI_SOFTMAX_H_
#define JAX_MAGI_SOFTMAX_H_

#include <cstdint>

#include "cc/dtype.h"
#include "cc/mask.h"

namespace jax_magi {

struct SoftmaxShape {
  int64_t batch, heads, q_len, k_len;
  DType dtype;
  int32_t lo, hi;  // Row i sees columns i + lo .. i + hi.

  JAX_MAGI_INLINE int64_t num_rows() const { return batch * heads * q_len; }
  JAX_MAGI_INLINE Slice band() const {
    return ClampSlice({0, static_cast<int32_t>(q_len), 0, static_cast<int32_t>(k_len), lo, hi},
                      static_cast<int32_t>(q_len), static_cast<int32_t>(k_len));
  }
};

enum class MaskKind { kNone, kBool, kAdditive };

struct SoftmaxMask {
  MaskKind kind = MaskKind::kNone;
  DType dtype = DType::kF32;  // The dtype of an additive mask: that of x, or float32.
  const void* data = nullptr;
  // In elements; 0 for a broadcast dimension.
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;
};

struct SoftmaxForwardArgs {
  SoftmaxShape shape;
  SoftmaxMask mask;
  float scale;
  const void* x;
  const float* offset;  // Null: none.
  int64_t offset_batch_stride = 0;
  void* y;                    // May be x.
  float* offset_probability;  // Null if there is no offset.
};

struct SoftmaxBackwardArgs {
  SoftmaxShape shape;
  float scale;
  const void *y, *dy;
  void* dx;    // May be y or dy.
  float* dot;  // Null: not requested.
};

// How scores map to exponents: exp((x * before + mask - max) * after).
struct ScoreScale {
  float before, after;
};

// If nothing is added to x, the maximum is subtracted before scaling, which is more accurate for
// large scores. `before` then carries the sign of the scale, so that the maximum stays a maximum.
// It is one half if |scale| < 1: the differences of large scores could otherwise overflow although
// the scaled differences are finite.
JAX_MAGI_INLINE ScoreScale GetScoreScale(const SoftmaxForwardArgs& args) {
  const bool is_alone = args.mask.kind != MaskKind::kAdditive && args.offset == nullptr;
  if (!is_alone || args.scale == 0.0f) return {args.scale, 1.0f};
  const float size = args.scale > 0.0f ? args.scale : -args.scale;
  const float before = size < 1.0f ? 0.5f : 1.0f;
  return {args.scale > 0.0f ? before : -before, size / before};
}

}  // namespace jax_magi

#endif  // JAX_MAGI_SOFTMAX_H_
