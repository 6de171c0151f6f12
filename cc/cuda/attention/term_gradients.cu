#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cc/cuda/attention/hidden_pairs.cuh"
#include "cc/cuda/attention/term_gradients.h"
#include "cc/cuda/launch.h"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 256;

// One CTA per query of each batch element, for all heads.
__global__ void ZeroHiddenKernel(HiddenPairs pairs) {
  __shared__ HiddenShared<128> shared;
  ZeroHidden<kThreads>(pairs, blockIdx.x, threadIdx.x, shared, [] { __syncthreads(); });
}

// --- Sums ---

struct KeySumArgs {
  const float* sums;  // [batch, num_q_heads, k_len]
  void* dbias;        // [batch or 1, num_q_heads or 1, k_len]
  DType dtype;
  int64_t batch, heads, k_len;         // The dimensions of `sums`.
  int64_t shared_batch, shared_heads;  // Number of them that share an element of dbias.
};

// Sums in a fixed order, so that results are reproducible.
__global__ void SumByKeyKernel(KeySumArgs args) {
  const int64_t num_heads = args.heads / args.shared_heads;
  const int64_t count = args.batch / args.shared_batch * num_heads * args.k_len;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t key = i % args.k_len, head = i / args.k_len % num_heads;
    const int64_t batch = i / args.k_len / num_heads;
    float sum = 0.0f;
    for (int64_t b = 0; b < args.shared_batch; ++b) {
      for (int64_t h = 0; h < args.shared_heads; ++h) {
        const int64_t row = (batch * args.shared_batch + b) * args.heads + head + h;
        sum += args.sums[row * args.k_len + key];
      }
    }
    if (args.dtype == DType::kF32) {
      static_cast<float*>(args.dbias)[i] = sum;
    } else if (args.dtype == DType::kBF16) {
      static_cast<__nv_bfloat16*>(args.dbias)[i] = __float2bfloat16_rn(sum);
    } else {
      static_cast<__half*>(args.dbias)[i] = __float2half_rn(sum);
    }
  }
}

// One CTA per head of each batch element.
__global__ void SumSlopesKernel(const float* moments, float* dslopes, int64_t k_len) {
  __shared__ float partial[kThreads];
  float sum = 0.0f;
  for (int64_t key = threadIdx.x; key < k_len; key += kThreads) {
    sum += moments[blockIdx.x * k_len + key];
  }
  partial[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dslopes[blockIdx.x] = partial[0];
}

}  // namespace

cudaError_t PrepareTermGradients(const BackwardArgs& args, float* sums, bool can_zero_hidden,
                                 cudaStream_t stream, TermGradients* gradients) {
  *gradients = {};
  const AttentionShape& shape = args.shape;
  const BiasLayout& layout = args.bias_layout;
  const int64_t num_sums = shape.batch * shape.num_q_heads * shape.k_len;
  const bool is_by_key = args.dbias != nullptr && IsBiasByKey(shape, layout);
  if (is_by_key) gradients->key_sums = sums;
  if (args.dslopes != nullptr) gradients->key_moments = sums + (is_by_key ? num_sums : 0);
  const int64_t num_vectors = int64_t{is_by_key} + (args.dslopes != nullptr);
  if (num_vectors * num_sums > 0) {
    const cudaError_t error =
        cudaMemsetAsync(sums, 0, num_vectors * num_sums * sizeof(float), stream);
    if (error != cudaSuccess) return error;
  }
  if (args.dbias == nullptr || is_by_key || shape.q_len == 0) return cudaSuccess;
  if (IsDbiasSummed(shape, layout, args.dtype)) {
    gradients->dbias_sums = static_cast<float*>(args.dbias);
    const int64_t count = (layout.batch_stride == 0 ? 1 : shape.batch) *
                          (layout.head_stride == 0 ? 1 : shape.num_q_heads) * shape.q_len *
                          shape.k_len;
    return cudaMemsetAsync(args.dbias, 0, count * sizeof(float), stream);
  }
  gradients->dbias = args.dbias;
  const HiddenPairs pairs{
      static_cast<uint16_t*>(args.dbias),
      args.slices,
      static_cast<int>(shape.batch),
      static_cast<int>(shape.num_q_heads),
      static_cast<int>(shape.q_len),
      static_cast<int>(shape.k_len),
      static_cast<int>(shape.num_slices),
      shape.shared_slices || shape.batch == 1 ? 0 : static_cast<int>(shape.num_slices)};
  if (can_zero_hidden) {
    gradients->hidden = pairs;
    return cudaSuccess;
  }
  const unsigned num_blocks = static_cast<unsigned>(shape.batch * shape.q_len);
  return LaunchKernel(ZeroHiddenKernel, num_blocks, kThreads, stream, pairs);
}

cudaError_t FinishTermGradients(const BackwardArgs& args, const TermGradients& gradients,
                                cudaStream_t stream) {
  const AttentionShape& shape = args.shape;
  const BiasLayout& layout = args.bias_layout;
  if (gradients.key_sums != nullptr) {
    const KeySumArgs sum{gradients.key_sums,
                         args.dbias,
                         args.dbias_dtype,
                         shape.batch,
                         shape.num_q_heads,
                         shape.k_len,
                         layout.batch_stride == 0 ? shape.batch : 1,
                         layout.head_stride == 0 ? shape.num_q_heads : 1};
    const int64_t count = shape.batch * shape.num_q_heads * shape.k_len;
    int num_sms;
    cudaError_t code = GetNumSms(&num_sms);
    if (code != cudaSuccess) return code;
    const int64_t num_blocks =
        std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, 8 * num_sms);
    code = LaunchKernel(SumByKeyKernel, static_cast<unsigned>(num_blocks), kThreads, stream, sum);
    if (code != cudaSuccess) return code;
  }
  if (gradients.key_moments != nullptr) {
    const unsigned num_blocks = static_cast<unsigned>(shape.batch * shape.num_q_heads);
    return LaunchKernel(SumSlopesKernel, num_blocks, kThreads, stream, gradients.key_moments,
                        args.dslopes, shape.k_len);
  }
  return cudaSuccess;
}

}  // namespace jax_magi::cuda
