#include "cc/cuda/attention/backward_finish.h"
#include "cc/cuda/attention/early_launch.cuh"
#include "cc/cuda/attention/online_softmax.cuh"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 256, kRowsPerBlock = kThreads / 4;

struct FinishArgs {
  DqSum sum;
  void* dq;  // [batch, q_len, num_q_heads, head_dim]
  int q_len, num_rows, num_q_heads, head_dim;
  uint32_t num_row_blocks, num_dq_blocks;
  float scale;
  DkvParts parts;
  void *dk, *dv;
  int64_t dk_size, dv_size;  // Elements of one part.
};

// Stores eight dims of a row.
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

// Reads eight dims of two of eight queries, laid out by DqSumPlace.
__device__ __forceinline__ void ReadByPair(const float* eight, int query, int dim, float scale,
                                           float (&x)[2][8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Four dims of two queries.
    const auto* chunk = reinterpret_cast<const float4*>(eight + DqSumPlace(query, dim + 4 * half));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 word = chunk[i];
      x[0][4 * half + 2 * i] = word.x * scale;
      x[1][4 * half + 2 * i] = word.y * scale;
      x[0][4 * half + 2 * i + 1] = word.z * scale;
      x[1][4 * half + 2 * i + 1] = word.w * scale;
    }
  }
}

// The same, laid out by DqSumPlaceByQuery.
__device__ __forceinline__ void ReadByQuery(const float* eight, int query, int dim, float scale,
                                            float (&x)[2][8]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto* row = reinterpret_cast<const float4*>(eight + DqSumPlaceByQuery(query + r, dim));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 word = row[i];
      x[r][4 * i] = word.x * scale;
      x[r][4 * i + 1] = word.y * scale;
      x[r][4 * i + 2] = word.z * scale;
      x[r][4 * i + 3] = word.w * scale;
    }
  }
}

// A CTA handles 64 rows of 64 dims, a thread eight dims of two rows.
template <typename Element, int kPanelDims, bool kByQuery>
__device__ __forceinline__ void FinishDq(const FinishArgs& args) {
  // The dims of all heads are adjacent, as in the rows of dq.
  const uint32_t num_pieces = args.sum.num_dims / 64, per_batch = args.num_q_heads * num_pieces;
  const int pieces = blockIdx.x % per_batch;
  const uint32_t row_block = blockIdx.x / per_batch;
  const int batch = row_block / args.num_row_blocks;
  const int query = row_block % args.num_row_blocks * kRowsPerBlock + threadIdx.x / 8 * 2;
  if (query >= args.q_len) return;
  const int head = pieces / num_pieces;
  const int dim = pieces % num_pieces * 64 + threadIdx.x % 8 * 8;
  const int panel = dim / kPanelDims, in_panel = dim % kPanelDims;
  const float* of_head = args.sum.data + (int64_t{batch} * args.num_q_heads + head) *
                                             args.num_rows * args.sum.num_dims;
  const float* eight = of_head + (int64_t{panel} * args.num_rows + query / 8 * 8) * kPanelDims;
  float x[2][8];
  if constexpr (kByQuery) {
    ReadByQuery(eight, query % 8, in_panel, args.scale, x);
  } else {
    ReadByPair(eight, query % 8, in_panel, args.scale, x);
  }
  if (dim >= args.head_dim) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (query + r >= args.q_len) break;
    const int64_t row = (int64_t{batch} * args.q_len + query + r) * args.num_q_heads + head;
    StoreEight(static_cast<Element*>(args.dq) + row * args.head_dim + dim, x[r]);
  }
}

// Sums eight elements of the parts, in order.
template <typename Element>
__device__ __forceinline__ void SumParts(const float* parts, int num_parts, int64_t size, void* out,
                                         int64_t first) {
  float x[8] = {};
  for (int part = 0; part < num_parts; ++part) {
    const auto* from = reinterpret_cast<const float4*>(parts + part * size + first);
    const float4 words[2] = {from[0], from[1]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[4 * i] += words[i].x;
      x[4 * i + 1] += words[i].y;
      x[4 * i + 2] += words[i].z;
      x[4 * i + 3] += words[i].w;
    }
  }
  StoreEight(static_cast<Element*>(out) + first, x);
}

template <typename Element>
__device__ __forceinline__ void FinishDkv(const FinishArgs& args) {
  int64_t first = (int64_t{blockIdx.x - args.num_dq_blocks} * kThreads + threadIdx.x) * 8;
  const DkvParts& parts = args.parts;
  if (first < args.dk_size) {
    SumParts<Element>(parts.data, parts.num_parts, args.dk_size, args.dk, first);
  } else if ((first -= args.dk_size) < args.dv_size) {
    SumParts<Element>(parts.data + parts.num_parts * args.dk_size, parts.num_parts, args.dv_size,
                      args.dv, first);
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) FinishBackwardKernel(FinishArgs args) {
  WaitForPreviousKernel();
  LetNextKernelStart();
  if (blockIdx.x < args.num_dq_blocks) {
    if (args.sum.num_dims <= 128) {
      FinishDq<Element, DqPanelDims(128), /*kByQuery=*/false>(args);
    } else if (args.sum.num_dims == 192) {
      FinishDq<Element, DqPanelDims(192), /*kByQuery=*/true>(args);
    } else {
      FinishDq<Element, DqPanelDims(256), /*kByQuery=*/true>(args);
    }
  } else {
    FinishDkv<Element>(args);
  }
}

}  // namespace

cudaError_t FinishBackward(const BackwardArgs& args, const DqSum& sum, const DkvParts& parts,
                           cudaStream_t stream) {
  const AttentionShape& shape = args.shape;
  const int64_t num_row_blocks = (shape.q_len + kRowsPerBlock - 1) / kRowsPerBlock;
  const int64_t num_dq_blocks =
      args.dq == nullptr ? 0
                         : shape.batch * shape.num_q_heads * (sum.num_dims / 64) * num_row_blocks;
  const int64_t num_keys = parts.num_parts > 1 ? shape.batch * shape.k_len * shape.num_kv_heads : 0;
  const int64_t dk_size = num_keys * shape.head_dim, dv_size = num_keys * shape.value_dim;
  const int64_t num_dkv_blocks = (dk_size + dv_size + 8 * kThreads - 1) / (8 * kThreads);
  if (num_dq_blocks + num_dkv_blocks == 0) return cudaSuccess;
  const FinishArgs finish{sum,
                          args.dq,
                          static_cast<int>(shape.q_len),
                          DqSumRows(shape.q_len),
                          static_cast<int>(shape.num_q_heads),
                          static_cast<int>(shape.head_dim),
                          static_cast<uint32_t>(num_row_blocks),
                          static_cast<uint32_t>(num_dq_blocks),
                          args.params.softmax_scale,
                          parts,
                          args.dk,
                          args.dv,
                          dk_size,
                          dv_size};
  // dq has the same dtype.
  const auto kernel = args.dkv_dtype == DType::kF32    ? FinishBackwardKernel<float>
                      : args.dkv_dtype == DType::kBF16 ? FinishBackwardKernel<bfloat16_t>
                                                       : FinishBackwardKernel<half_t>;
  return LaunchEarly(kernel, static_cast<int>(num_dq_blocks + num_dkv_blocks), kThreads, 0, stream,
                     finish);
}

}  // namespace jax_magi::cuda
