// The forward kernels of the softmax over rows.

#ifndef JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_FORWARD_CUH_
#define JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_FORWARD_CUH_

#include "cc/cuda/arithmetic.cuh"
#include "cc/cuda/softmax/row_mask.cuh"
#include "cc/cuda/softmax/softmax_rows.cuh"
#include "cc/softmax.h"

namespace jax_magi::cuda {

struct SoftmaxForwardParams {
  RowsParams rows;
  SoftmaxMask mask;
  RowDivisor heads;
  // This many matrices share a mask. They are processed in chunks of 2^log2_chunk_rows rows, one
  // chunk after another: a chunk of the mask is then read from memory once, and those of x in the
  // same order.
  uint32_t num_sharing;
  int log2_chunk_rows;
  RowDivisor chunk_rows, sharing_rows;  // Rows of all these matrices, per chunk and in total.
  ScoreScale scale;
  const void* x;
  const float* offset;
  int64_t offset_batch_stride;
  void* y;
  float* offset_probability;
};

// Threads per SM, for MinBlocks.
template <typename Element, typename Mask, int kVectors>
constexpr int kForwardThreads = kIsMaskShort<Element, Mask> && kVectors <= 4 ? 1024 : 512;

// The value subtracted from scores; finite if no score is visible, because -inf - -inf would be
// NaN.
__device__ __forceinline__ float Reference(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// A score's exponential relative to a reference. Also the factor that converts exponentials
// relative to the score to exponentials relative to the reference.
__device__ __forceinline__ float RelativeExp(float score, float reference, float after) {
  return Exp2((score - reference) * after);
}

// A sum of exponentials of scores, relative to Reference(largest).
struct ExpSum {
  float largest, sum;
};

// Reduces the sums of a warp's threads, relative to the warp's largest score, to the sum of the
// row.
template <int kThreads>
__device__ __forceinline__ ExpSum SumOfRow(ExpSum own, float after) {
  own.sum = ReduceInWarp<kThreads>(own.sum, SumOp{});
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32;
    const ExpSum other = ExchangeByWarps<kThreads>(own);
    own.largest = ReduceInWarp<kWarps>(other.largest, MaxOp{});
    const float factor = RelativeExp(other.largest, Reference(own.largest), after);
    own.sum = ReduceInWarp<kWarps>(other.sum * factor, SumOp{});
  }
  return own;
}

template <int kThreads>
__device__ __forceinline__ RowPlace FindRow(const SoftmaxForwardParams& params, bool has_mask) {
  const uint32_t index = RowIndex<kThreads>();
  RowPlace place{IsActive<kThreads>(params.rows, index), index, 0, 0, 0};
  if (!has_mask && !params.rows.is_banded && params.offset == nullptr) return place;
  const uint32_t group = params.sharing_rows.Divide(index);
  const uint32_t in_group = index - group * params.sharing_rows.divisor;
  const uint32_t chunk = params.chunk_rows.Divide(in_group);
  const uint32_t in_chunk = in_group - chunk * params.chunk_rows.divisor;
  const uint32_t matrix = group * params.num_sharing + (in_chunk >> params.log2_chunk_rows);
  place.q = (chunk << params.log2_chunk_rows) + (in_chunk & ((1u << params.log2_chunk_rows) - 1));
  place.row = matrix * params.rows.q_len.divisor + place.q;
  place.batch = params.heads.Divide(matrix);
  place.head = matrix - place.batch * params.heads.divisor;
  return place;
}

// A thread's inputs of a row: vectors of x, and their mask.
template <typename Element, typename Mask, int kVectors>
struct RowInputs {
  uint32_t x[kVectors][4];
  uint32_t mask[kVectors][kHasMask<Mask> ? kVectorSize<Element> * sizeof(Mask) / 4 : 1];

  // Loads vectors first, first + kThreads, ...
  template <int kThreads, Caching kCaching>
  __device__ __forceinline__ void Load(const SoftmaxForwardParams& params,
                                       const Row<kVectorSize<Element>>& row,
                                       const MaskRow<Mask>& mask_row, int first) {
    LoadVectors<Element, kThreads, kCaching>(static_cast<const Element*>(params.x), row, first, x);
    if constexpr (kHasMask<Mask>) LoadMask<Mask, kThreads>(mask_row, row, first, mask);
  }
};

// Computes scores before ScoreScale::after, with -inf where they are hidden. Vectors without
// visible columns are filled with -inf or left alone: each of the two loops that call this spills
// with the other choice. Returns the largest score, or `largest`.
template <typename Element, typename Mask, int kThreads, bool kFillsHidden, int kVectors>
__device__ __forceinline__ float MakeScores(const SoftmaxForwardParams& params,
                                            const Row<kVectorSize<Element>>& row, int first,
                                            const RowInputs<Element, Mask, kVectors>& inputs,
                                            float largest,
                                            float (&scores)[kVectors][kVectorSize<Element>]) {
  constexpr int kSize = kVectorSize<Element>;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = first + i * kThreads;
    if (!Contains(row.touched, v)) {
#pragma unroll
      for (int e = 0; kFillsHidden && e < kSize; ++e) scores[i][e] = -INFINITY;
      continue;
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const float x = GetElement<Element>(inputs.x[i], e);
      if constexpr (!kHasMask<Mask>) {
        scores[i][e] = x * params.scale.before;
      } else if constexpr (std::is_same_v<Mask, uint8_t>) {
        const bool is_visible = GetElement<Mask>(inputs.mask[i], e) != 0.0f;
        scores[i][e] = is_visible ? x * params.scale.before : -INFINITY;
      } else {
        scores[i][e] = x * params.scale.before + GetElement<Mask>(inputs.mask[i], e);
      }
    }
    if (!Contains(row.clean, v)) {
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        if (!Contains(row.visible, row.Column(v) + e)) scores[i][e] = -INFINITY;
      }
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) largest = fmaxf(largest, scores[i][e]);
  }
  return largest;
}

// The factor of a row's exponentials. `sum` is their sum, without that of the offset.
__device__ __forceinline__ float FinishRow(const SoftmaxForwardParams& params,
                                           const RowPlace& place, float offset, float reference,
                                           float sum, bool is_writer) {
  if (params.offset == nullptr) return sum == 0.0f ? 0.0f : Reciprocal(sum);
  const float weight = RelativeExp(offset, reference, params.scale.after);
  const float inverse = sum + weight == 0.0f ? 0.0f : Reciprocal(sum + weight);
  if (is_writer) params.offset_probability[place.row] = weight * inverse;
  return inverse;
}

__device__ __forceinline__ float GetOffset(const SoftmaxForwardParams& params,
                                           const RowPlace& place) {
  if (params.offset == nullptr || !place.is_active) return -INFINITY;
  return params.offset[place.batch * params.offset_batch_stride + place.head];
}

template <typename Element, typename Mask, bool kIsWhole, int kThreads, int kVectors>
__global__ void __launch_bounds__(BlockThreads(kThreads),
                                  MinBlocks(kThreads, kForwardThreads<Element, Mask, kVectors>))
    SoftmaxForwardKernel(const __grid_constant__ SoftmaxForwardParams params) {
  constexpr int kSize = kVectorSize<Element>;
  // Other rows may read the same mask: it should stay in L2.
  constexpr Caching kCaching = kHasMask<Mask> ? Caching::kFirstOut : Caching::kPlain;
  const int thread = threadIdx.x % kThreads;
  const RowPlace place = FindRow<kThreads>(params, kHasMask<Mask>);
  const Row<kSize> row = GetRow<kSize, kIsWhole>(params.rows, place.is_active, place.row, place.q);
  const MaskRow<Mask> mask = GetMaskRow<Mask, kIsWhole>(params.mask, place, row);
  const float offset = GetOffset(params, place);
  // With a mask, there are no registers for a first vector other than the row's.
  const int first = kHasMask<Mask> ? thread : row.touched.begin + thread;

  RowInputs<Element, Mask, kVectors> inputs;
  inputs.template Load<kThreads, kCaching>(params, row, mask, first);
  // Overlaps with the loads.
  Element* y = static_cast<Element*>(params.y);
  StoreHidden<Element, kThreads, kCaching>(y, row, thread);
  float x[kVectors][kSize];  // Scores, later their exponentials.
  float largest = MakeScores<Element, Mask, kThreads, /*kFillsHidden=*/false>(params, row, first,
                                                                              inputs, offset, x);
  // Each warp takes exponentials relative to its own largest score: the largest score of the row is
  // known only after a barrier, and this way one barrier is enough.
  largest = ReduceInWarp<kThreads>(largest, MaxOp{});
  const float warp_reference = Reference(largest);

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!Contains(row.touched, first + i * kThreads)) continue;
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      x[i][e] = RelativeExp(x[i][e], warp_reference, params.scale.after);
      sum += x[i][e];
    }
  }
  const ExpSum total = SumOfRow<kThreads>({largest, sum}, params.scale.after);
  const float reference = Reference(total.largest);
  float factor =
      FinishRow(params, place, offset, reference, total.sum, place.is_active && thread == 0);
  if (kThreads > 32) factor *= RelativeExp(largest, reference, params.scale.after);
  StoreVectors<Element, kThreads, kCaching, kVectors>(
      y, row, first, [&](int i, int e) { return x[i][e] * factor; });
}

template <typename Element, typename Mask, int kThreads>
__global__ void __launch_bounds__(kThreads, MinBlocks(kThreads, 512))
    LongSoftmaxForwardKernel(const __grid_constant__ SoftmaxForwardParams params) {
  constexpr int kSize = kVectorSize<Element>;
  constexpr int kStep = kThreads * kChunkVectors;
  const int thread = threadIdx.x;
  const RowPlace place = FindRow<kThreads>(params, kHasMask<Mask>);
  const Row<kSize> row =
      GetRow<kSize, /*kIsWhole=*/false>(params.rows, place.is_active, place.row, place.q);
  const MaskRow<Mask> mask = GetMaskRow<Mask, /*kIsWhole=*/false>(params.mask, place, row);
  const float offset = GetOffset(params, place);

  Element* y = static_cast<Element*>(params.y);
  StoreHidden<Element, kThreads, Caching::kFirstOut>(y, row, thread);
  float largest = -INFINITY, sum = 0.0f;  // They cover this thread's columns so far.
  RowInputs<Element, Mask, kChunkVectors> inputs;
  float x[kChunkVectors][kSize];
  for (int chunk = row.touched.begin; chunk < row.touched.end; chunk += kStep) {
    inputs.template Load<kThreads, Caching::kPlain>(params, row, mask, chunk + thread);
    const float new_largest = MakeScores<Element, Mask, kThreads, /*kFillsHidden=*/true>(
        params, row, chunk + thread, inputs, largest, x);
    const float reference = Reference(new_largest);
    sum *= RelativeExp(largest, reference, params.scale.after);
#pragma unroll
    for (int i = 0; i < kChunkVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kSize; ++e) sum += RelativeExp(x[i][e], reference, params.scale.after);
    }
    largest = new_largest;
  }
  const float warp_largest = ReduceInWarp<kThreads>(fmaxf(largest, offset), MaxOp{});
  sum *= RelativeExp(largest, Reference(warp_largest), params.scale.after);
  const ExpSum total = SumOfRow<kThreads>({warp_largest, sum}, params.scale.after);
  const float reference = Reference(total.largest);
  const float inverse =
      FinishRow(params, place, offset, reference, total.sum, place.is_active && thread == 0);
  // Each thread reads again only what it then writes, and all threads have finished the first pass:
  // this is correct in place, too.
  for (int chunk = row.touched.begin; chunk < row.touched.end; chunk += kStep) {
    inputs.template Load<kThreads, Caching::kFirstOut>(params, row, mask, chunk + thread);
    MakeScores<Element, Mask, kThreads, /*kFillsHidden=*/true>(params, row, chunk + thread, inputs,
                                                               largest, x);
    StoreVectors<Element, kThreads, Caching::kFirstOut, kChunkVectors>(
        y, row, chunk + thread, [&](int i, int e) {
          return RelativeExp(x[i][e], reference, params.scale.after) * inverse;
        });
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_FORWARD_CUH_
