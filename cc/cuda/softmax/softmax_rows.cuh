// The rows of a softmax and their threads: what forward and backward kernels share.
//
// Both are memory-bound, so the aim is to read each element once, in 16-byte vectors, with many
// loads in flight. kThreads threads own a row: a part of a warp, or a CTA. Each thread loads all of
// its kVectors vectors, of the visible part of the row, before it uses any, and keeps them in
// registers. Rows that are too long for this are read twice, in chunks.

#ifndef JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_ROWS_CUH_
#define JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_ROWS_CUH_

#include "cc/cuda/softmax/divisor.cuh"
#include "cc/cuda/softmax/row_vectors.cuh"

namespace jax_magi::cuda {

// The parameters of the rows in both passes.
struct RowsParams {
  uint32_t num_rows;
  RowDivisor q_len;
  int k_len;
  int64_t num_elements;
  Slice band;
  bool is_banded;
};

// A CTA has one row, if a row takes a warp or more: all threads then know the row from the index of
// the CTA, and no thread waits for another row.
constexpr int BlockThreads(int threads_per_row) {
  return threads_per_row < 32 ? 128 : threads_per_row;
}
constexpr int RowsPerBlock(int threads_per_row) {
  return BlockThreads(threads_per_row) / threads_per_row;
}

// Minimum number of CTAs per SM. With fewer, too little memory traffic is in flight while others
// compute; with more, there would be too few registers.
constexpr int MinBlocks(int threads_per_row, int num_threads) {
  return num_threads / BlockThreads(threads_per_row);
}

// Vectors per thread in a chunk of a long row.
constexpr int kChunkVectors = 4;

template <int kThreads>
__device__ __forceinline__ uint32_t RowIndex() {
  constexpr int kRows = RowsPerBlock(kThreads);
  return kRows == 1 ? blockIdx.x : blockIdx.x * kRows + threadIdx.x / kThreads;
}

// Whether this row exists. The grid has no more CTAs than needed.
template <int kThreads>
__device__ __forceinline__ bool IsActive(const RowsParams& params, uint32_t index) {
  return RowsPerBlock(kThreads) == 1 || index < params.num_rows;
}

template <int kSize, bool kIsWhole>
__device__ __forceinline__ Row<kSize> GetRow(const RowsParams& params, bool is_active, uint32_t row,
                                             uint32_t q) {
  Row<kSize> r =
      MakeRow<kSize, kIsWhole>(row, params.k_len, params.num_elements, VisibleKeys(params.band, q));
  if (!is_active) r.Clear();
  return r;
}

// --- Reductions over the threads of a row ---

struct MaxOp {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOp {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Reduces over the threads of the row in this warp. All of them get the result.
template <int kThreads, typename Op>
__device__ __forceinline__ float ReduceInWarp(float x, Op op) {
#pragma unroll
  for (int distance = (kThreads < 32 ? kThreads : 32) / 2; distance > 0; distance /= 2) {
    x = op(x, __shfl_xor_sync(~0u, x, distance));
  }
  return x;
}

// Each warp provides an x, and thread i of a warp gets that of warp i of its row, modulo their
// number. A CTA may call this only once: it does not wait until all threads have read.
template <int kThreads, typename T>
__device__ __forceinline__ T ExchangeByWarps(const T& x) {
  static_assert(RowsPerBlock(kThreads) == 1);
  constexpr int kWarps = kThreads / 32;
  __shared__ T partial[kWarps];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  return partial[threadIdx.x % kWarps];
}

// The sum over all threads of the row, returned to each of them.
template <int kThreads>
__device__ __forceinline__ float SumOfRow(float x) {
  x = ReduceInWarp<kThreads>(x, SumOp{});
  if constexpr (kThreads > 32) {
    x = ReduceInWarp<kThreads / 32>(ExchangeByWarps<kThreads>(x), SumOp{});
  }
  return x;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_ROWS_CUH_
