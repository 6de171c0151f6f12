// The terms of a tile of logits besides q k^T, bias and ALiBi, and their gradients.
//
// Everything has internal linkage, as in vector.h.

#ifndef JAX_MAGI_CPU_TILE_TERMS_H_
#define JAX_MAGI_CPU_TILE_TERMS_H_

#include "cc/attention.h"
#include "cc/cpu/tile_kernels.h"
#include "cc/cpu/tile_ops.h"

namespace jax_magi::cpu {
namespace {

// A tile of the score matrix, inside the arrays: `row` and `key` are its first row and key.
struct TilePlace {
  int64_t batch, head;
  int32_t row, key;
  int num_rows, num_keys;
};

inline int64_t BiasOffset(const BiasLayout& layout, const TilePlace& place) {
  return place.batch * layout.batch_stride + place.head * layout.head_stride +
         place.row * layout.q_stride + place.key;
}

// Adds the bias to scores[key][row]. Rows are rounded up to whole vectors. `memory` holds
// kTermsScratch floats.
template <typename T>
void AddBias(const T* bias, const BiasLayout& layout, const TilePlace& place, float* memory,
             float* scores) {
  float* rows = memory;
  bias += BiasOffset(layout, place);
  if (layout.q_stride == 0) {
    LoadRows(bias, /*stride=*/0, /*rows=*/1, place.num_keys, /*padded_rows=*/1, 1.0f, rows, kTile);
    for (int key = 0; key < place.num_keys; ++key) {
      float* s = scores + key * kTile;
      for (int row = 0; row < place.num_rows; row += kLanes) {
        Store(s + row, Load(s + row) + rows[key]);
      }
    }
    return;
  }
  float* columns = memory + kTile * kTile;
  const int padded_rows = RoundUp(place.num_rows, kLanes);
  LoadRows(bias, layout.q_stride, place.num_rows, place.num_keys, padded_rows, 1.0f, rows, kTile);
  Transpose(padded_rows, place.num_keys, rows, kTile, columns, kTile);
  for (int key = 0; key < place.num_keys; ++key) {
    float* s = scores + key * kTile;
    for (int row = 0; row < place.num_rows; row += kLanes) {
      Store(s + row, Load(s + row) + Load(columns + key * kTile + row));
    }
  }
}

// Adds slope * (key - row) to scores[key][row]. Rows are rounded up to whole vectors.
void AddAlibi(float slope, const TilePlace& place, float* scores) {
  Vec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<float>(i);
  for (int key = 0; key < place.num_keys; ++key) {
    float* s = scores + key * kTile;
    for (int row = 0; row < place.num_rows; row += kLanes) {
      // Positions are subtracted as integers: float32 would round large ones.
      const Vec distance = static_cast<float>(place.key + key - place.row - row) - lane;
      Store(s + row, Load(s + row) + slope * distance);
    }
  }
}

// Adds both terms, if the call has them. T is the type of q.
template <typename T, typename Args>
void AddTerms(const Args& args, const TilePlace& place, float* memory, float* scores) {
  if (args.bias != nullptr) {
    if (args.bias_layout.dtype == DType::kF32) {
      AddBias(static_cast<const float*>(args.bias), args.bias_layout, place, memory, scores);
    } else {
      AddBias(static_cast<const T*>(args.bias), args.bias_layout, place, memory, scores);
    }
  }
  if (args.alibi_slopes != nullptr) {
    AddAlibi(args.alibi_slopes[place.batch * args.shape.num_q_heads + place.head], place, scores);
  }
}

// Adds dscores[row][key] to the gradient of the bias.
void AddBiasGradient(const BiasLayout& layout, const TilePlace& place, const float* dscores,
                     float* dbias) {
  dbias += BiasOffset(layout, place);
  for (int row = 0; row < place.num_rows; ++row) {
    float* sum = dbias + row * layout.q_stride;
    const float* ds = dscores + row * kTile;
    for (int key = 0; key < place.num_keys; ++key) sum[key] += ds[key];
  }
}

// The sum of dscores[row][key] * (key - row), in float64, because terms of both signs nearly
// cancel.
double AlibiGradient(const TilePlace& place, const float* dscores) {
  double sum = 0.0;
  for (int row = 0; row < place.num_rows; ++row) {
    const float* ds = dscores + row * kTile;
    double row_sum = 0.0, row_moment = 0.0;
    for (int key = 0; key < place.num_keys; ++key) {
      row_sum += ds[key];
      row_moment += static_cast<double>(ds[key]) * key;
    }
    sum += row_moment + row_sum * (place.key - place.row - row);
  }
  return sum;
}

}  // namespace
}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_TILE_TERMS_H_
