// Softmax of one row, forward and backward. Compiled once per instruction set.
//
// A row's visible columns are copied to scratch as float32, and padded to whole vectors.

#include "cc/cpu/row_kernels.h"

#include "cc/cpu/convert.h"
#include "cc/cpu/vector.h"

namespace jax_magi::cpu {
namespace {

constexpr float kInf = __builtin_inff();

// The position of a row, and its visible columns.
struct RowPlace {
  int64_t batch, head, q;
  int64_t begin, length;  // The visible columns.
  int64_t first;          // Index of the row's first element in its array.
};

RowPlace FindRow(const SoftmaxShape& shape, int64_t row) {
  const int64_t q = row % shape.q_len, matrix = row / shape.q_len;
  const Range visible = VisibleKeys(shape.band(), static_cast<int32_t>(q));
  const int64_t length = Max(visible.end - visible.begin, 0);
  return {matrix / shape.heads, matrix % shape.heads, q, length > 0 ? visible.begin : 0, length,
          row * shape.k_len};
}

int64_t RoundUp(int64_t x) { return (x + kLanes - 1) / kLanes * kLanes; }

float MaxLane(Vec x) {
  float largest = x[0];
  for (int i = 1; i < kLanes; ++i) largest = x[i] > largest || x[i] != x[i] ? x[i] : largest;
  return largest;
}

float SumLanes(Vec x) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

template <typename T>
void Fill(T* begin, T* end, T value) {
  for (T* p = begin; p < end; ++p) *p = value;
}

template <typename T>
void ToFloats(const T* __restrict src, int64_t length, float factor, float* __restrict dst) {
  for (int64_t i = 0; i < length; ++i) dst[i] = ToFloat(src[i]) * factor;
}

// Writes zeros outside the visible columns, and `values` times `factor` inside.
template <typename T>
void WriteRow(const RowPlace& place, int64_t k_len, const float* __restrict values, float factor,
              T* __restrict row) {
  const int64_t end = place.begin + place.length;
  Fill(row, row + place.begin, FromFloat<T>(0.0f));
  T* visible = row + place.begin;
  for (int64_t i = 0; i < place.length; ++i) visible[i] = FromFloat<T>(values[i] * factor);
  Fill(row + end, row + k_len, FromFloat<T>(0.0f));
}

template <typename T>
void AddMask(const T* mask, int64_t stride, int64_t length, float* scores) {
  if (stride == 0) {
    const float value = ToFloat(*mask);
    for (int64_t i = 0; i < length; ++i) scores[i] += value;
  } else {
    for (int64_t i = 0; i < length; ++i) scores[i] += ToFloat(mask[i]);
  }
}

template <typename T>
void ApplyMask(const SoftmaxMask& mask, const RowPlace& place, float* scores) {
  const int64_t begin = place.batch * mask.batch_stride + place.head * mask.head_stride +
                        place.q * mask.row_stride + place.begin * mask.column_stride;
  switch (mask.kind) {
    case MaskKind::kNone:
      return;
    case MaskKind::kBool: {
      const uint8_t* visible = static_cast<const uint8_t*>(mask.data) + begin;
      for (int64_t i = 0; i < place.length; ++i) {
        scores[i] = visible[i * mask.column_stride] ? scores[i] : -kInf;
      }
      return;
    }
    case MaskKind::kAdditive:
      if (mask.dtype == DType::kF32) {
        AddMask(static_cast<const float*>(mask.data) + begin, mask.column_stride, place.length,
                scores);
      } else {
        AddMask(static_cast<const T*>(mask.data) + begin, mask.column_stride, place.length, scores);
      }
  }
}

template <typename T>
void Forward(const SoftmaxForwardArgs& args, int64_t row, float* scores) {
  const SoftmaxShape& shape = args.shape;
  const RowPlace place = FindRow(shape, row);
  const ScoreScale scale = GetScoreScale(args);
  const float offset = args.offset == nullptr
                           ? -kInf
                           : args.offset[place.batch * args.offset_batch_stride + place.head];
  ToFloats(static_cast<const T*>(args.x) + place.first + place.begin, place.length, scale.before,
           scores);
  ApplyMask<T>(args.mask, place, scores);
  const int64_t padded = RoundUp(place.length);
  Fill(scores + place.length, scores + padded, -kInf);

  Vec max = Broadcast(offset);
  for (int64_t i = 0; i < padded; i += kLanes) max = Max(max, Load(scores + i));
  const float largest = MaxLane(max);
  // For a fully masked row, subtract 0, because -inf - -inf would be NaN.
  const float reference = largest == -kInf ? 0.0f : largest;
  Vec sums{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec e = Exp((Load(scores + i) - reference) * scale.after);
    sums += e;
    Store(scores + i, e);
  }
  const float offset_weight = Exp(Broadcast((offset - reference) * scale.after))[0];
  const float sum = SumLanes(sums) + offset_weight;
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (args.offset_probability != nullptr) args.offset_probability[row] = offset_weight * inverse;
  WriteRow(place, shape.k_len, scores, inverse, static_cast<T*>(args.y) + place.first);
}

template <typename T>
void Backward(const SoftmaxBackwardArgs& args, int64_t row, float* scratch) {
  const SoftmaxShape& shape = args.shape;
  const RowPlace place = FindRow(shape, row);
  float* y = scratch;
  float* dy = scratch + RowFloats(shape.k_len);
  const int64_t padded = RoundUp(place.length);
  const int64_t first = place.first + place.begin;
  ToFloats(static_cast<const T*>(args.y) + first, place.length, 1.0f, y);
  ToFloats(static_cast<const T*>(args.dy) + first, place.length, 1.0f, dy);
  Fill(y + place.length, y + padded, 0.0f);
  Fill(dy + place.length, dy + padded, 0.0f);

  Vec sums{};
  for (int64_t i = 0; i < padded; i += kLanes) sums += Load(y + i) * Load(dy + i);
  const float dot = SumLanes(sums);
  for (int64_t i = 0; i < padded; i += kLanes) Store(y + i, Load(y + i) * (Load(dy + i) - dot));
  if (args.dot != nullptr) args.dot[row] = dot;
  WriteRow(place, shape.k_len, y, args.scale, static_cast<T*>(args.dx) + place.first);
}

template <typename Args, void (*kF32)(const Args&, int64_t, float*),
          void (*kBF16)(const Args&, int64_t, float*), void (*kF16)(const Args&, int64_t, float*)>
void ByDType(const Args& args, int64_t row, float* scratch) {
  switch (args.shape.dtype) {
    case DType::kF32:
      return kF32(args, row, scratch);
    case DType::kBF16:
      return kBF16(args, row, scratch);
    case DType::kF16:
      return kF16(args, row, scratch);
  }
}

}  // namespace

extern const RowKernels JAX_MAGI_ROW_KERNELS;
const RowKernels JAX_MAGI_ROW_KERNELS = {
    ByDType<SoftmaxForwardArgs, Forward<float>, Forward<BF16>, Forward<F16>>,
    ByDType<SoftmaxBackwardArgs, Backward<float>, Backward<BF16>, Backward<F16>>};

}  // namespace jax_magi::cpu
