#include "cc/cuda/attention/backward_finish.h"

#include "cc/cuda/attention/early_launch.h"
#include "cc/cuda/attention/hopper.cuh"
#include "cc/cuda/attention/online_softmax.cuh"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 256, kRowsPerBlock = kThreads / 4;

struct FinishArgs {
  DqSum sum;
  void* dq;  // [batch, q_len, num_q_heads, head_dim]
  int q_len, num_rows, num_q_heads, head_dim, num_row_blocks;
  float scale;
};

// Eight dims of a row.
template <typename Element>
__device__ __forceinline__ void StoreEight(Element* to, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(to) =
      make_uint4(PackPair<Element>(x[0], x[1]), PackPair<Element>(x[2], x[3]),
                 PackPair<Element>(x[4], x[5]), PackPair<Element>(x[6], x[7]));
}
template <>
__device__ __forceinline__ void StoreEight<float>(float* to, const float (&x)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// A block of threads has 64 rows of a panel, a thread 8 dims of two.
template <typename Element>
__global__ void __launch_bounds__(kThreads) FinishBackwardKernel(FinishArgs args) {
  WaitForPreviousKernel();
  LetNextKernelStart();
  const int panels = blockIdx.x / args.num_row_blocks;  // Of [batch, num_q_heads, num_panels].
  const int query = blockIdx.x % args.num_row_blocks * kRowsPerBlock + threadIdx.x / 8 * 2;
  if (query >= args.q_len) return;
  const int heads = panels / args.sum.num_panels, panel = panels % args.sum.num_panels;
  const int dim = threadIdx.x % 8 * 8;  // Of the panel's.
  const float* rows = args.sum.data + int64_t{panels} * args.num_rows * 64;
  float x[2][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Four dims of two queries.
    const auto* chunk =
        reinterpret_cast<const float4*>(rows + int64_t{DqSumPlace(query, dim + 4 * half)});
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 word = chunk[i];
      x[0][4 * half + 2 * i] = word.x * args.scale;
      x[1][4 * half + 2 * i] = word.y * args.scale;
      x[0][4 * half + 2 * i + 1] = word.z * args.scale;
      x[1][4 * half + 2 * i + 1] = word.w * args.scale;
    }
  }
  if (panel * 64 + dim >= args.head_dim) return;
  const int batch = heads / args.num_q_heads, head = heads % args.num_q_heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (query + r >= args.q_len) break;
    const int64_t row = (int64_t{batch} * args.q_len + query + r) * args.num_q_heads + head;
    StoreEight(static_cast<Element*>(args.dq) + row * args.head_dim + panel * 64 + dim, x[r]);
  }
}

}  // namespace

cudaError_t FinishBackward(const BackwardArgs& args, const DqSum& sum, cudaStream_t stream) {
  const AttentionShape& shape = args.shape;
  const int num_row_blocks = static_cast<int>((shape.q_len + kRowsPerBlock - 1) / kRowsPerBlock);
  const FinishArgs finish{sum,
                          args.dq,
                          static_cast<int>(shape.q_len),
                          DqSumRows(shape.q_len),
                          static_cast<int>(shape.num_q_heads),
                          static_cast<int>(shape.head_dim),
                          num_row_blocks,
                          args.params.softmax_scale};
  const int64_t num_blocks = shape.batch * shape.num_q_heads * sum.num_panels * num_row_blocks;
  if (num_blocks == 0) return cudaSuccess;
  const auto kernel = args.dq_dtype == DType::kF32    ? FinishBackwardKernel<float>
                      : args.dq_dtype == DType::kBF16 ? FinishBackwardKernel<cutlass::bfloat16_t>
                                                      : FinishBackwardKernel<cutlass::half_t>;
  return LaunchEarly(kernel, static_cast<int>(num_blocks), kThreads, 0, stream, finish);
}

}  // namespace jax_magi::cuda
