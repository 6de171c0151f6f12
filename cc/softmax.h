// What one fused scale + mask + softmax is made of, whichever device computes it.
//
// With s = scale * x + mask over visible columns, and an offset z that is one more logit:
//
//   y = exp(s) / (sum of exp(s) + exp(z)),   offset_probability = exp(z) / (the same)
//
// A column is visible if the band shows it and a boolean mask holds true there. Rows that see
// nothing, or only scores of -inf, are zero. Backward: dot = sum of y * dy, dx = scale * y * (dy -
// dot).
//
// Layouts (row-major):
//   x, y, dy, dx              [batch, heads, q_len, k_len]
//   mask                      the same, and each dimension may be 1: broadcast
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
  DType dtype = DType::kF32;  // Of an additive mask: x's, or float32.
  const void* data = nullptr;
  // In elements; 0 where the mask is broadcast.
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
  float* dot;  // Null: not asked for.
};

// How scores become exponents: exp((x * before + mask - max) * after).
struct ScoreScale {
  float before, after;
};

// Where nothing is added to x, differences are taken before they are scaled: with large scores that
// is more accurate. `before` then carries the sign, so that the maximum stays a maximum, and halves
// where a scale makes differences finite that overflow without it.
JAX_MAGI_INLINE ScoreScale GetScoreScale(const SoftmaxForwardArgs& args) {
  const bool is_alone = args.mask.kind != MaskKind::kAdditive && args.offset == nullptr;
  if (!is_alone || args.scale == 0.0f) return {args.scale, 1.0f};
  const float size = args.scale > 0.0f ? args.scale : -args.scale;
  const float before = size < 1.0f ? 0.5f : 1.0f;
  return {args.scale > 0.0f ? before : -before, size / before};
}

}  // namespace jax_magi

#endif  // JAX_MAGI_SOFTMAX_H_
