// Attention over one tile, forward and backward. Compiled once per instruction set.
//
// Score tiles are stored transposed, [key][row], with rows across vector lanes. The softmax then
// needs no reduction inside a vector, and probabilities are already depth-major for P V and dS K.

#include "cc/cpu/tile_kernels.h"

#include <cmath>

#include "cc/cpu/tile_ops.h"
#include "cc/cpu/tile_terms.h"

namespace jax_magi::cpu {
namespace {

constexpr float kInf = __builtin_inff();

// Hands out consecutive pieces of one scratch buffer.
struct Scratch {
  float* next;
  float* Take(int64_t num_floats) {
    float* piece = next;
    next += num_floats;
    return piece;
  }
};

const Slice* SlicesOf(const AttentionShape& shape, const Slice* slices, int64_t batch) {
  return slices + (shape.shared_slices ? 0 : batch * shape.num_slices);
}

Slice GetSlice(const AttentionShape& shape, const Slice* slices, int64_t i) {
  return ClampSlice(slices[i], static_cast<int32_t>(shape.q_len),
                    static_cast<int32_t>(shape.k_len));
}

// Element offset of (batch, row, head) in [batch, length, heads, dim].
int64_t RowOffset(int64_t batch, int64_t length, int64_t row, int64_t heads, int64_t head,
                  int64_t dim) {
  return ((batch * length + row) * heads + head) * dim;
}

// Sets scores[key][row] to `value` where the slice hides the pair. The tile's rows begin at
// `rows_begin`, and are limited to [0, num_rows); `keys` are counted from `keys_begin`.
void Hide(const Slice& s, int32_t rows_begin, int num_rows, int32_t keys_begin, Range keys,
          float value, float* scores) {
  for (int key = keys.begin; key < keys.end; ++key) {
    const int32_t global_key = keys_begin + key;
    const bool in_slice = s.k_begin <= global_key && global_key < s.k_end;
    const Range rows = in_slice ? VisibleRows(s, global_key) : Range{0, 0};
    const int begin = Min(Max(rows.begin - rows_begin, 0), num_rows);
    const int end = Max(Min(rows.end - rows_begin, num_rows), begin);
    float* row = scores + key * kTile;
    for (int i = 0; i < begin; ++i) row[i] = value;
    for (int i = end; i < num_rows; ++i) row[i] = value;
  }
}

// --- Forward ---

// The running softmax of one query tile, one float per row.
struct RowState {
  float *max, *sum, *max_logit, *correction;
};

// Turns scores[key][row], with hidden logits -inf, into probabilities relative to the running
// maximum, and updates the running statistics.
void OnlineSoftmax(int num_keys, int row_begin, int row_end, float softcap, float* scores,
                   const RowState& state) {
  const Vec inverse_cap = Broadcast(softcap != 0.0f ? 1.0f / softcap : 0.0f);
  for (int row = row_begin; row < row_end; row += kLanes) {
    Vec max = Broadcast(-kInf);
    for (int key = 0; key < num_keys; ++key) max = Max(Load(scores + key * kTile + row), max);
    Store(state.max_logit + row, Max(max, Load(state.max_logit + row)));
    // tanh is monotonic: the largest capped logit is the cap of the largest logit.
    if (softcap != 0.0f) {
      max = Select(max == -kInf, max, softcap * Tanh(max * inverse_cap));
    }
    const Vec old_max = Load(state.max + row);
    const Vec new_max = Max(max, old_max);
    // If a row has not seen any key yet, subtract 0, because -inf - -inf would be NaN.
    const Vec reference = Select(new_max == -kInf, Vec{}, new_max);
    const Vec correction = Exp(old_max - reference);
    Vec sum = Load(state.sum + row) * correction;
    for (int key = 0; key < num_keys; ++key) {
      float* p = scores + key * kTile + row;
      Vec s = Load(p);
      if (softcap != 0.0f) s = Select(s == -kInf, s, softcap * Tanh(s * inverse_cap));
      const Vec probability = Exp(s - reference);
      sum += probability;
      Store(p, probability);
    }
    Store(state.max + row, new_max);
    Store(state.sum + row, sum);
    Store(state.correction + row, correction);
  }
}

template <typename T>
void Forward(const ForwardArgs& args, int64_t batch, int64_t head, int64_t q_tile, float* memory,
             float* tile_max) {
  const AttentionShape& shape = args.shape;
  const int64_t kv_head = head / shape.group();
  const int64_t dim = shape.head_dim, dim_pad = PaddedDim(dim);
  const int64_t value_dim = shape.value_dim, value_pad = PaddedDim(value_dim);
  const int64_t kv_stride = shape.num_kv_heads * dim, v_stride = shape.num_kv_heads * value_dim;
  const int32_t q_begin = static_cast<int32_t>(q_tile * kTile);
  const int num_rows = static_cast<int>(Min(shape.q_len - q_begin, kTile));

  Scratch scratch{memory};
  float* rows = scratch.Take(kTile * dim_pad);  // Rows as loaded, before they are transposed.
  float* q_t = scratch.Take(dim_pad * kTile);
  float* k_t = scratch.Take(dim_pad * kTile);
  float* v = scratch.Take(kTile * value_pad);
  float* scores = scratch.Take(kTile * kTile);
  float* acc = scratch.Take(kTile * value_pad);
  const RowState state{scratch.Take(kTile), scratch.Take(kTile), scratch.Take(kTile),
                       scratch.Take(kTile)};
  float* terms = scratch.Take(kTermsScratch);

  const T* q = static_cast<const T*>(args.q) +
               RowOffset(batch, shape.q_len, q_begin, shape.num_q_heads, head, dim);
  LoadRows(q, shape.num_q_heads * dim, num_rows, dim, kTile, args.params.softmax_scale, rows,
           dim_pad);
  Transpose(kTile, dim, rows, dim_pad, q_t, kTile);

  // A row begins with the sink, or with the results of earlier calls over other keys. These act
  // like one more key, whose logit is their lse and whose value is their output.
  const int64_t first_row =
      RowOffset(batch, shape.q_len, q_begin, shape.num_q_heads, head, /*dim=*/1);
  const float sink = args.sink[batch * shape.num_q_heads + head];
  for (int row = 0; row < kTile; ++row) {
    const bool has_lse = args.running_out != nullptr && row < num_rows;
    state.max[row] = has_lse ? args.lse[first_row + row * shape.num_q_heads] : sink;
    state.sum[row] = state.max[row] == -kInf ? 0.0f : 1.0f;
    state.max_logit[row] = -kInf;
  }
  const auto load_running = [&](const auto* out) {
    LoadRows(out + first_row * value_dim, shape.num_q_heads * value_dim, num_rows, value_dim, kTile,
             1.0f, acc, value_pad);
  };
  if (args.running_out != nullptr && args.running_dtype == DType::kF32) {
    load_running(static_cast<const float*>(args.running_out));
  } else if (args.running_out != nullptr) {
    load_running(static_cast<const T*>(args.running_out));
  } else {
    std::memset(acc, 0, sizeof(float) * kTile * value_pad);
  }

  bool sees_keys = false;
  const Slice* slices = SlicesOf(shape, args.slices, batch);
  for (int64_t i = 0; i < shape.num_slices; ++i) {
    const Slice slice = GetSlice(shape, slices, i);
    const Range tile_rows = Intersect({q_begin, q_begin + num_rows}, {slice.q_begin, slice.q_end});
    if (tile_rows.begin >= tile_rows.end) continue;
    const Range touched = TouchedKeys(slice, tile_rows);
    const Range clean = CleanKeys(slice, tile_rows);
    // The vectors that hold the slice's rows; the rest of the tile stays unchanged.
    const int row_begin = RoundDown(tile_rows.begin - q_begin, kBlockCols);
    const int row_end = RoundUp(tile_rows.end - q_begin, kBlockCols);
    const bool whole_vectors =
        row_begin == tile_rows.begin - q_begin && row_end == tile_rows.end - q_begin;

    for (int32_t key = touched.begin; key < touched.end; key += kTile) {
      sees_keys = true;
      const int num_keys = Min(touched.end - key, kTile);
      const T* k_rows = static_cast<const T*>(args.k) +
                        RowOffset(batch, shape.k_len, key, shape.num_kv_heads, kv_head, dim);
      const T* v_rows = static_cast<const T*>(args.v) +
                        RowOffset(batch, shape.k_len, key, shape.num_kv_heads, kv_head, value_dim);
      const int padded_keys = RoundUp(num_keys, kBlockRows);
      LoadRows(k_rows, kv_stride, num_keys, dim, padded_keys, 1.0f, rows, dim_pad);
      Transpose(padded_keys, dim, rows, dim_pad, k_t, kTile);
      LoadRows(v_rows, v_stride, num_keys, value_dim, num_keys, 1.0f, v, value_pad);

      MatMul<false>(num_keys, row_end - row_begin, dim, k_t, kTile, q_t + row_begin, kTile,
                    scores + row_begin, kTile);
      if (args.bias != nullptr || args.alibi_slopes != nullptr) {
        const int term_rows = Min(row_end, num_rows) - row_begin;
        AddTerms<T>(args, {batch, head, q_begin + row_begin, key, term_rows, num_keys}, terms,
                    scores + row_begin);
      }
      if (!whole_vectors || key < clean.begin || key + num_keys > clean.end) {
        Hide(slice, q_begin + row_begin, row_end - row_begin, key, {0, num_keys}, -kInf,
             scores + row_begin);
      }
      OnlineSoftmax(num_keys, row_begin, row_end, args.params.softcap, scores, state);
      for (int row = row_begin; row < row_end; ++row) {
        if (state.correction[row] == 1.0f) continue;
        float* acc_row = acc + row * value_pad;
        for (int64_t d = 0; d < value_pad; ++d) acc_row[d] *= state.correction[row];
      }
      MatMul<true>(row_end - row_begin, value_pad, num_keys, scores + row_begin, kTile, v,
                   value_pad, acc + row_begin * value_pad, value_pad);
    }
  }

  *tile_max = -kInf;
  if (args.running_out == args.out && args.out != nullptr && !sees_keys) return;
  float largest = -kInf;
  for (int row = 0; row < num_rows; ++row) {
    const float sum = state.sum[row];
    const int64_t head_row = first_row + row * shape.num_q_heads;
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (args.out_dtype == DType::kF32) {
      StoreRow(acc + row * value_pad, value_dim, factor,
               static_cast<float*>(args.out) + head_row * value_dim);
    } else {
      StoreRow(acc + row * value_pad, value_dim, factor,
               static_cast<T*>(args.out) + head_row * value_dim);
    }
    args.lse[head_row] = sum == 0.0f ? -kInf : state.max[row] + std::log(sum);
    // The maximum skips NaN, but the sum does not. A NaN logit must not look like a healthy head.
    const float logit = std::isnan(sum) ? sum : state.max_logit[row];
    if (!std::isnan(largest) && !(largest >= logit)) largest = logit;
  }
  *tile_max = largest;
}

// --- Backward ---

// Turns scores[key][row] = scaled logits and dscores[key][row] = dP, in place, into P and
// dS = P (dP - delta), the latter with respect to the scaled logits before the cap.
void SoftmaxGradient(Range keys, int num_rows, float softcap, const float* lse, const float* delta,
                     float* scores, float* dscores) {
  const Vec inverse_cap = Broadcast(softcap != 0.0f ? 1.0f / softcap : 0.0f);
  for (int row = 0; row < num_rows; row += kLanes) {
    // For a fully masked row, subtract 0, because -inf - -inf would be NaN where a bias is -inf.
    const Vec loaded = Load(lse + row);
    const Vec row_lse = Select(loaded == -kInf, Vec{}, loaded);
    const Vec row_delta = Load(delta + row);
    for (int key = keys.begin; key < keys.end; ++key) {
      float* s = scores + key * kTile + row;
      float* ds = dscores + key * kTile + row;
      Vec logit = Load(s);
      Vec slope = Broadcast(1.0f);
      if (softcap != 0.0f) {
        const Vec t = Tanh(logit * inverse_cap);
        logit = Select(logit == -kInf, logit, softcap * t);
        slope = 1.0f - t * t;
      }
      // A hidden pair's logit may exceed lse by any amount; its probability is zeroed afterwards,
      // but the exponent must stay in the range of Exp.
      const Vec p = Exp(Min(Broadcast(80.0f), logit - row_lse));  // Keeps NaN.
      Store(s, p);
      Store(ds, p * (Load(ds) - row_delta) * slope);
    }
  }
}

template <typename T, typename TGrad>
void Backward(const BackwardArgs& args, int64_t batch, int64_t kv_head, int64_t k_tile, float* dq,
              double* dslopes, float* memory) {
  const AttentionShape& shape = args.shape;
  const int64_t dim = shape.head_dim, dim_pad = PaddedDim(dim);
  const int64_t value_dim = shape.value_dim, value_pad = PaddedDim(value_dim);
  const int64_t q_stride = shape.num_q_heads * dim, do_stride = shape.num_q_heads * value_dim;
  const int32_t k_begin = static_cast<int32_t>(k_tile * kTile);
  const int num_keys = static_cast<int>(Min(shape.k_len - k_begin, kTile));
  const float scale = args.params.softmax_scale;

  Scratch scratch{memory};
  float* k = scratch.Take(kTile * dim_pad);
  float* k_t = scratch.Take(dim_pad * kTile);
  float* v_t = scratch.Take(value_pad * kTile);
  float* q = scratch.Take(kTile * dim_pad);
  float* q_t = scratch.Take(dim_pad * kTile);
  float* dout = scratch.Take(kTile * value_pad);
  float* dout_t = scratch.Take(value_pad * kTile);
  float* dk = scratch.Take(kTile * dim_pad);
  float* dv = scratch.Take(kTile * value_pad);
  float* dq_tile = scratch.Take(kTile * dim_pad);
  float* scores = scratch.Take(kTile * kTile);
  float* dscores = scratch.Take(kTile * kTile);
  float* transposed = scratch.Take(kTile * kTile);
  float* lse = scratch.Take(kTile);
  float* delta = scratch.Take(kTile);
  float* terms = scratch.Take(kTermsScratch);

  const int64_t k_row = RowOffset(batch, shape.k_len, k_begin, shape.num_kv_heads, kv_head, 1);
  const int64_t k_heads = shape.num_kv_heads;
  // v is staged in the buffer of dout, which is not needed before the first query tile.
  LoadRows(static_cast<const T*>(args.v) + k_row * value_dim, k_heads * value_dim, num_keys,
           value_dim, kTile, 1.0f, dout, value_pad);
  Transpose(kTile, value_dim, dout, value_pad, v_t, kTile);
  LoadRows(static_cast<const T*>(args.k) + k_row * dim, k_heads * dim, num_keys, dim, kTile, 1.0f,
           k, dim_pad);
  Transpose(kTile, dim, k, dim_pad, k_t, kTile);
  std::memset(dk, 0, sizeof(float) * kTile * dim_pad);
  std::memset(dv, 0, sizeof(float) * kTile * value_pad);

  const Slice* slices = SlicesOf(shape, args.slices, batch);
  for (int64_t i = 0; i < shape.num_slices; ++i) {
    const Slice slice = GetSlice(shape, slices, i);
    const Range slice_keys = Intersect({k_begin, k_begin + num_keys}, {slice.k_begin, slice.k_end});
    if (slice_keys.begin >= slice_keys.end || slice.q_begin >= slice.q_end) continue;
    const Range touched = TouchedRows(slice, slice_keys);
    const Range clean = CleanRows(slice, slice_keys);
    // Whole blocks of keys; the first and last block may extend past the slice, and are masked
    // there.
    const Range keys{RoundDown(slice_keys.begin - k_begin, kBlockRows),
                     RoundUp(slice_keys.end - k_begin, kBlockRows)};
    const bool whole_blocks =
        keys.begin == slice_keys.begin - k_begin && keys.end == slice_keys.end - k_begin;
    const int block_keys = keys.end - keys.begin;

    for (int64_t head = kv_head * shape.group(); head < (kv_head + 1) * shape.group(); ++head) {
      for (int32_t row = touched.begin; row < touched.end; row += kTile) {
        const int num_rows = Min(touched.end - row, kTile);
        const int block_rows = RoundUp(num_rows, kBlockCols);
        const int64_t q_row =
            RowOffset(batch, shape.q_len, row, shape.num_q_heads, head, /*dim=*/1);
        LoadRows(static_cast<const T*>(args.q) + q_row * dim, q_stride, num_rows, dim, block_rows,
                 scale, q, dim_pad);
        Transpose(block_rows, dim, q, dim_pad, q_t, kTile);
        LoadRows(static_cast<const T*>(args.dout) + q_row * value_dim, do_stride, num_rows,
                 value_dim, block_rows, 1.0f, dout, value_pad);
        Transpose(block_rows, value_dim, dout, value_pad, dout_t, kTile);
        LoadRows(args.lse + q_row, shape.num_q_heads, num_rows, /*dim=*/1, kTile, 1.0f, lse,
                 /*ld_dst=*/1);
        LoadRows(args.delta + q_row, shape.num_q_heads, num_rows, /*dim=*/1, kTile, 1.0f, delta,
                 /*ld_dst=*/1);

        MatMul<false>(block_keys, block_rows, dim, k_t + keys.begin, kTile, q_t, kTile,
                      scores + keys.begin * kTile, kTile);
        MatMul<false>(block_keys, block_rows, value_dim, v_t + keys.begin, kTile, dout_t, kTile,
                      dscores + keys.begin * kTile, kTile);
        // Excludes the keys that only fill a block.
        const TilePlace place{
            batch, head, row, k_begin + keys.begin, num_rows, Min(keys.end, num_keys) - keys.begin};
        if (args.bias != nullptr || args.alibi_slopes != nullptr) {
          AddTerms<T>(args, place, terms, scores + keys.begin * kTile);
        }
        SoftmaxGradient(keys, block_rows, args.params.softcap, lse, delta, scores, dscores);
        if (!whole_blocks || block_rows != num_rows || row < clean.begin ||
            row + num_rows > clean.end) {
          Hide(slice, row, block_rows, k_begin, keys, 0.0f, scores);
          Hide(slice, row, block_rows, k_begin, keys, 0.0f, dscores);
        }

        Transpose(block_keys, block_rows, scores + keys.begin * kTile, kTile,
                  transposed + keys.begin, kTile);
        MatMul<true>(block_keys, value_pad, num_rows, transposed + keys.begin, kTile, dout,
                     value_pad, dv + keys.begin * value_pad, value_pad);
        Transpose(block_keys, block_rows, dscores + keys.begin * kTile, kTile,
                  transposed + keys.begin, kTile);
        MatMul<true>(block_keys, dim_pad, num_rows, transposed + keys.begin, kTile, q, dim_pad,
                     dk + keys.begin * dim_pad, dim_pad);
        if (args.dbias != nullptr) {
          AddBiasGradient(args.bias_layout, place, transposed + keys.begin,
                          static_cast<float*>(args.dbias));
        }
        if (args.dslopes != nullptr) {
          dslopes[batch * shape.num_q_heads + head] +=
              AlibiGradient(place, transposed + keys.begin);
        }
        // Only the slice's own keys, because 0 times a NaN of a hidden key would be NaN.
        const int first_key = slice_keys.begin - k_begin;
        MatMul<false>(block_rows, dim_pad, slice_keys.end - slice_keys.begin,
                      dscores + first_key * kTile, kTile, k + first_key * dim_pad, dim_pad, dq_tile,
                      dim_pad);
        const bool is_summed = args.dq_sum != nullptr;
        const int64_t dq_stride = is_summed ? dim : q_stride;
        float* dq_rows =
            dq + (is_summed ? (batch * shape.num_q_heads + head) * args.dq_sum_words + row * dim
                            : q_row * dim);
        for (int r = 0; r < num_rows; ++r) {
          float* dq_row = dq_rows + r * dq_stride;
          for (int64_t d = 0; d < dim; ++d) dq_row[d] += dq_tile[r * dim_pad + d];
        }
      }
    }
  }

  for (int key = 0; key < num_keys; ++key) {
    const int64_t head_row = k_row + key * k_heads;
    StoreRow(dk + key * dim_pad, dim, 1.0f, static_cast<TGrad*>(args.dk) + head_row * dim);
    StoreRow(dv + key * value_pad, value_dim, 1.0f,
             static_cast<TGrad*>(args.dv) + head_row * value_dim);
  }
}

// --- Selection by element type ---

void ForwardAnyType(const ForwardArgs& args, int64_t batch, int64_t head, int64_t q_tile,
                    float* scratch, float* tile_max) {
  switch (args.dtype) {
    case DType::kF32:
      return Forward<float>(args, batch, head, q_tile, scratch, tile_max);
    case DType::kBF16:
      return Forward<BF16>(args, batch, head, q_tile, scratch, tile_max);
    case DType::kF16:
      return Forward<F16>(args, batch, head, q_tile, scratch, tile_max);
  }
}

template <typename T>
void BackwardAnyGrad(const BackwardArgs& args, int64_t batch, int64_t kv_head, int64_t k_tile,
                     float* dq, double* dslopes, float* scratch) {
  if (args.dkv_dtype == DType::kF32) {
    Backward<T, float>(args, batch, kv_head, k_tile, dq, dslopes, scratch);
  } else {
    Backward<T, T>(args, batch, kv_head, k_tile, dq, dslopes, scratch);
  }
}

void BackwardAnyType(const BackwardArgs& args, int64_t batch, int64_t kv_head, int64_t k_tile,
                     float* dq, double* dslopes, float* scratch) {
  switch (args.dtype) {
    case DType::kF32:
      return BackwardAnyGrad<float>(args, batch, kv_head, k_tile, dq, dslopes, scratch);
    case DType::kBF16:
      return BackwardAnyGrad<BF16>(args, batch, kv_head, k_tile, dq, dslopes, scratch);
    case DType::kF16:
      return BackwardAnyGrad<F16>(args, batch, kv_head, k_tile, dq, dslopes, scratch);
  }
}

}  // namespace

extern const TileKernels JAX_MAGI_TILE_KERNELS;
const TileKernels JAX_MAGI_TILE_KERNELS = {ForwardAnyType, BackwardAnyType};

}  // namespace jax_magi::cpu
