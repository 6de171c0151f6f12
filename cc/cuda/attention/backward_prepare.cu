#include <algorithm>

#include "cc/cuda/attention/backward_prepare.h"
#include "cc/cuda/attention/early_launch.h"
#include "cc/cuda/attention/hopper.cuh"

namespace jax_magi::cuda {
namespace {

struct PrepareArgs {
  const float *lse, *delta;  // [batch, q_len, num_q_heads]
  QueryStatistic* statistics;
  float factor;
  int q_len, padded_queries, num_q_heads;
  int64_t num_statistics;  // With those that are padded.
  float4* dq;
  int64_t num_dq_vectors;  // 0: it is not summed.
  WorkCounter* counter;
};

__global__ void PrepareBackwardKernel(PrepareArgs args) {
  // This kernel came up while the one before it ended, and the next one may come up now.
  WaitForPreviousKernel();
  LetNextKernelStart();
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  if (first == 0) args.counter->next_work = args.counter->next_hidden = 0;
  for (int64_t i = first; i < args.num_statistics; i += stride) {
    const int64_t row = i / args.padded_queries;  // Of [batch, num_q_heads].
    const int64_t batch = row / args.num_q_heads;
    const int query = static_cast<int>(i % args.padded_queries);
    const int64_t from =
        (batch * args.q_len + query) * args.num_q_heads + row - batch * args.num_q_heads;
    const bool is_inside = query < args.q_len;
    const float lse = is_inside ? args.lse[from] : -INFINITY;
    args.statistics[i / 8].start[i % 8] = lse == -INFINITY ? -INFINITY : -lse * args.factor;
    args.statistics[i / 8].delta[i % 8] = is_inside ? args.delta[from] : 0.0f;
  }
  for (int64_t i = first; i < args.num_dq_vectors; i += stride) {
    args.dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace

cudaError_t PrepareBackward(const BackwardArgs& args, float factor, const DqSum& sum,
                            QueryStatistic* statistics, WorkCounter* counter, cudaStream_t stream) {
  const AttentionShape& shape = args.shape;
  const PrepareArgs prepare{
      args.lse,
      args.delta,
      statistics,
      factor,
      static_cast<int>(shape.q_len),
      PaddedQueries(shape.q_len),
      static_cast<int>(shape.num_q_heads),
      shape.batch * shape.num_q_heads * PaddedQueries(shape.q_len),
      reinterpret_cast<float4*>(sum.data),
      DqSumBytes(shape, sum.num_panels) / static_cast<int64_t>(sizeof(float4)),
      counter};
  // Enough threads for all that a GPU holds at once, and no more than there is to do.
  constexpr int kThreads = 256, kMaxBlocks = 132 * 8;
  const int64_t most = std::max(prepare.num_statistics, prepare.num_dq_vectors);
  const int num_blocks =
      static_cast<int>(std::clamp<int64_t>((most + kThreads - 1) / kThreads, 1, kMaxBlocks));
  return LaunchEarly(PrepareBackwardKernel, num_blocks, kThreads, 0, stream, prepare);
}

}  // namespace jax_magi::cuda
