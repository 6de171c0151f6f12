// The terms of a score besides the product of queries and keys: a bias, and ALiBi slopes.
//
// Kernels with terms turn scores into logits, softmax_scale * q k^T + bias + slope * (j - i), in
// natural units, before masking and soft capping. They may leave a factor and an offset to the
// softmax, as a LogitScale.

#ifndef JAX_MAGI_CUDA_ATTENTION_SCORE_TERMS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SCORE_TERMS_CUH_

#include "cc/cuda/attention/instructions.cuh"
#include "cc/cuda/attention/online_softmax.cuh"

namespace jax_magi::cuda {

// How a kernel loads the bias.
enum class BiasKind : int32_t {
  kNone,
  kTiles,  // The operands' dtype, different for each query: loaded by TMA.
  kByKey,  // The same for all queries.
  kFloat,  // float32, different for each query: loaded word by word.
};

struct ScoreTerms {
  BiasKind kind;
  bool is_float;     // The bias is float32; else it has the operands' element type.
  const void* bias;  // [batch, num_q_heads, q_len, k_len]; the stride of a shared dimension is 0.
  int64_t batch_stride, head_stride, q_stride;
  const float* slopes;  // [batch, num_q_heads]; null: none.
  SoftmaxScale scale;   // For scores in natural units. An inverse_cap of 0 means no cap.
  float inverse_scale;  // 1 / softmax_scale.

  __device__ __forceinline__ int64_t Offset(int batch, int head) const {
    return batch * batch_stride + head * head_stride;
  }
  template <typename Element>
  __device__ __forceinline__ float Load(int64_t offset) const {
    return is_float ? static_cast<const float*>(bias)[offset]
                    : ToFloat(static_cast<const Element*>(bias)[offset]);
  }
};

// scores = scores * factor + bias. load(step, x) loads packed pairs of the 16 columns from 16 *
// step on, as four 8 x 8 matrices: two row groups by two column groups.
template <typename Element, int kCount, typename Load>
__device__ __forceinline__ void AddPackedBias(float factor, float (&scores)[kCount], Load load) {
#pragma unroll
  for (int step = 0; step < kCount / 8; ++step) {
    uint32_t x[4];
    load(step, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = UnpackPair<Element>(x[i]);
      float* pair = scores + 8 * step + 2 * i;
      pair[0] = pair[0] * factor + bias.x;
      pair[1] = pair[1] * factor + bias.y;
    }
  }
}

// The same, where load(i, r, x) loads the bias of column pair `i` and row `r`.
template <int kCount, typename Load>
__device__ __forceinline__ void AddBias(float factor, float (&scores)[kCount], Load load) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float bias[2];
      load(i, r, bias);
      float* pair = scores + 4 * i + 2 * r;
      pair[0] = pair[0] * factor + bias[0];
      pair[1] = pair[1] * factor + bias[1];
    }
  }
}

// A block of a float32 bias for a warp's 16 rows, in shared memory of that warp. Eight columns are
// contiguous; the same columns of neighbouring rows lie in different banks.
template <int kColumns>
struct StagedRows {
  static_assert(kColumns % 64 == 0, "rows differ in three bits");
  float* rows;

  __device__ __forceinline__ float* At(unsigned row, unsigned column) const {
    return rows + row * kColumns + (column ^ (row % 8 * 8));
  }

  // Copies from `source`, whose rows are `stride` apart, the columns from `begin` on. Fills with
  // zeros from row `num_rows` on, and outside columns [0, num_columns).
  __device__ __forceinline__ void Copy(const float* source, int64_t stride, int num_rows, int begin,
                                       int num_columns, unsigned lane) const {
    source += begin + int(lane);
    __syncwarp();  // All lanes have read the previous block.
#pragma unroll 1
    for (int row = 0; row < 16; ++row, source += stride) {
#pragma unroll 1
      for (int i = 0; i < kColumns; i += 32) {
        const int column = begin + int(lane) + i;
        const bool is_inside = row < num_rows && 0 <= column && column < num_columns;
        CopyWord(At(row, lane + i), source + i, is_inside);
      }
    }
    WaitForCopies();
    __syncwarp();
  }

  // scores = scores * factor + the block.
  __device__ __forceinline__ void Add(float factor, unsigned lane,
                                      float (&scores)[kColumns / 2]) const {
    AddBias(factor, scores, [&](int i, int r, float (&x)[2]) {
      const float2 pair =
          *reinterpret_cast<const float2*>(At(8 * r + lane / 4, 8 * i) + 2 * (lane % 4));
      x[0] = pair.x;
      x[1] = pair.y;
    });
  }
};

// scores = scores + step * column, where columns count from the thread's first.
template <int kCount>
__device__ __forceinline__ void AddSteps(float step, float (&scores)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] += step * static_cast<float>(i / 4 * 8 + i % 2);
}

// Maps a thread's scores to logits before any cap: score * factor + offset[row]. Threads that share
// a row may have different offsets.
struct LogitScale {
  float factor, offset[2];
};

// OnlineSoftmax of logits. An inverse_cap of 0 means no cap. state.max is the maximum of logits.
template <bool kMayHaveCap, int kCount>
__device__ __forceinline__ bool OnlineSoftmaxOfLogits(const SoftmaxScale& scale,
                                                      const LogitScale& logit, RowState& state,
                                                      float (&scores)[kCount],
                                                      float (&correction)[2]) {
  float max[2];
  ThreadMax(scores, max);
  float log2 = logit.factor * scale.log2;
  float offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.max[r] = MaxOrNan(state.max[r], max[r] * logit.factor + logit.offset[r]);
    offset[r] = logit.offset[r] * scale.log2;
  }
  if (kMayHaveCap && scale.inverse_cap != 0.0f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = Cap(scores[i] * logit.factor + logit.offset[i / 2 % 2], scale);
    }
    ThreadMax(scores, max);
    log2 = scale.log2;
    offset[0] = offset[1] = 0.0f;
  }
  bool is_far = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    is_far |= !(max[r] * log2 + (offset[r] - state.reference[r]) <= kSlack);
  }
  const bool has_moved = __any_sync(~0u, is_far);
  if (has_moved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float old = state.reference[r];
      state.reference[r] = MaxOrNan(old, QuadMax(max[r] * log2 + offset[r]));
      correction[r] = Exp2(old - state.reference[r]);
      state.sum[r] *= correction[r];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) offset[r] -= state.reference[r];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int r = i / 2 % 2;
    scores[i] = Exp2(scores[i] * log2 + offset[r]);
    state.sum[r] += scores[i];
  }
  return has_moved;
}

// scores = scores * factor + base[row] + step * column, where columns count from the thread's
// first.
template <int kCount>
__device__ __forceinline__ void AddSlopes(float factor, float step, const float (&base)[2],
                                          float (&scores)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float column = static_cast<float>(8 * i + e % 2);
      scores[4 * i + e] = scores[4 * i + e] * factor + (step * column + base[e / 2]);
    }
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_SCORE_TERMS_CUH_
