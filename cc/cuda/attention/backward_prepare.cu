#include <algorithm>

#include "cc/cuda/arithmetic.cuh"
#include "cc/cuda/attention/backward_prepare.h"
#include "cc/cuda/attention/early_launch.h"
#include "cc/cuda/attention/hopper.cuh"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 8;  // Of zeros. Not tuned.

struct PrepareArgs {
  const float *lse, *delta;  // [batch, q_len, num_q_heads]
  QueryStatistic* statistics;
  uint32_t q_len, num_eights, num_q_heads;  // Eight queries have a statistic.
  uint32_t num_statistics, num_statistic_blocks;
  float4* zeros;
  int64_t num_zero_vectors;
  WorkCounter* counter;
};

// Neighbours have the same eight queries of neighbouring heads, as lse has them side by side.
__device__ __forceinline__ void MakeStatistic(const PrepareArgs& args) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= args.num_statistics) return;
  const uint32_t rows = index / args.num_q_heads, head = index % args.num_q_heads;
  const uint32_t batch = rows / args.num_eights, eight = rows % args.num_eights;
  QueryStatistic statistic;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t query = eight * 8 + i;
    const int64_t from = (int64_t{batch} * args.q_len + query) * args.num_q_heads + head;
    const bool is_inside = query < args.q_len;
    const float lse = is_inside ? args.lse[from] : -INFINITY;
    statistic.start[i] = lse == -INFINITY ? -INFINITY : -lse * kLog2E;
    statistic.delta[i] = is_inside ? args.delta[from] : 0.0f;
  }
  args.statistics[(int64_t{batch} * args.num_q_heads + head) * args.num_eights + eight] = statistic;
}

__global__ void __launch_bounds__(kThreads) PrepareBackwardKernel(PrepareArgs args) {
  // This kernel came up while the one before it ended, and the next one may come up now.
  WaitForPreviousKernel();
  LetNextKernelStart();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.counter->next_work = args.counter->next_hidden = 0;
  }
  if (blockIdx.x < args.num_statistic_blocks) {
    MakeStatistic(args);
    return;
  }
  const int64_t first =
      int64_t{blockIdx.x - args.num_statistic_blocks} * (kThreads * kVectorsPerThread) +
      threadIdx.x;
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector < args.num_zero_vectors) args.zeros[vector] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace

cudaError_t PrepareBackward(const BackwardArgs& args, const ZeroBytes& zeros,
                            QueryStatistic* statistics, WorkCounter* counter, cudaStream_t stream) {
  const AttentionShape& shape = args.shape;
  const auto num_eights = static_cast<uint32_t>(PaddedQueries(shape.q_len) / 8);
  const auto num_q_heads = static_cast<uint32_t>(shape.num_q_heads);
  const auto num_statistics = static_cast<uint32_t>(shape.batch) * num_q_heads * num_eights;
  const uint32_t num_statistic_blocks = CeilDiv(num_statistics, kThreads);
  const PrepareArgs prepare{args.lse,
                            args.delta,
                            statistics,
                            static_cast<uint32_t>(shape.q_len),
                            num_eights,
                            num_q_heads,
                            num_statistics,
                            num_statistic_blocks,
                            static_cast<float4*>(zeros.data),
                            zeros.num_bytes / static_cast<int64_t>(sizeof(float4)),
                            counter};
  constexpr int kVectors = kThreads * kVectorsPerThread;
  const int64_t num_zero_blocks = (prepare.num_zero_vectors + kVectors - 1) / kVectors;
  // One at least: it resets the counter.
  const int64_t num_blocks = std::max<int64_t>(num_statistic_blocks + num_zero_blocks, 1);
  return LaunchEarly(PrepareBackwardKernel, static_cast<int>(num_blocks), kThreads, 0, stream,
                     prepare);
}

}  // namespace jax_magi::cuda
