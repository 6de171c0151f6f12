#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cc/cuda/attention/term_gradients.h"
#include "cc/mask.h"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 256;

// --- Zeros for pairs that no slice shows: the backward kernel writes the others ---

struct HiddenArgs {
  AttentionShape shape;
  const Slice* slices;
  uint16_t* dbias;  // [batch, num_q_heads, q_len, k_len], k_len a multiple of 8.
};

// One block of threads for each query of the batch, and all its heads.
__global__ void ZeroHiddenKernel(HiddenArgs args) {
  constexpr int kMaxRanges = 128;
  __shared__ Range ranges[kMaxRanges];
  __shared__ int num_ranges;
  const AttentionShape& shape = args.shape;
  const int q_len = static_cast<int>(shape.q_len), k_len = static_cast<int>(shape.k_len);
  const int num_slices = static_cast<int>(shape.num_slices);
  const int query = blockIdx.x % q_len;
  const int64_t batch = blockIdx.x / q_len;
  const Slice* slices = args.slices + (shape.shared_slices ? 0 : batch * shape.num_slices);
  const auto visible = [&](int i) {
    const Slice slice = ClampSlice(slices[i], q_len, k_len);
    const bool has_query = slice.q_begin <= query && query < slice.q_end;
    return has_query ? VisibleKeys(slice, query) : Range{0, 0};
  };
  if (threadIdx.x == 0) num_ranges = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_slices; i += kThreads) {
    const Range keys = visible(i);
    if (keys.begin >= keys.end) continue;
    const int index = atomicAdd(&num_ranges, 1);
    if (index < kMaxRanges) ranges[index] = keys;
  }
  __syncthreads();
  // With more ranges than that, slices are looked at again for each piece of keys.
  const bool has_ranges = num_ranges <= kMaxRanges;
  const int num_looks = has_ranges ? num_ranges : num_slices;
  for (int key = 8 * threadIdx.x; key < k_len; key += 8 * kThreads) {
    unsigned shown = 0;  // Which of eight keys.
    for (int i = 0; i < num_looks; ++i) {
      const Range keys = has_ranges ? ranges[i] : visible(i);
      const int begin = Clamp(keys.begin - key, 0, 8), end = Clamp(keys.end - key, 0, 8);
      if (begin < end) shown |= (1u << end) - (1u << begin);
    }
    if (shown == 0xff) continue;
    uint16_t* row = args.dbias + (batch * shape.num_q_heads * q_len + query) * k_len + key;
    for (int64_t head = 0; head < shape.num_q_heads; ++head, row += shape.q_len * k_len) {
      if (shown == 0) {
        *reinterpret_cast<uint4*>(row) = make_uint4(0, 0, 0, 0);
      } else {
        for (int i = 0; i < 8; ++i) {
          if (!(shown >> i & 1)) row[i] = 0;
        }
      }
    }
  }
}

// --- Sums ---

struct KeySumArgs {
  const float* sums;  // [batch, num_q_heads, k_len]
  void* dbias;        // [batch or 1, num_q_heads or 1, k_len]
  DType dtype;
  int64_t batch, heads, k_len;         // Of the sums.
  int64_t shared_batch, shared_heads;  // How many of them share an element of dbias.
};

// In order, so that results are the same each time.
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

// One block of threads for each head of the batch.
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

cudaError_t PrepareTermGradients(const BackwardArgs& args, void* workspace, cudaStream_t stream,
                                 TermGradients* gradients) {
  *gradients = {};
  const AttentionShape& shape = args.shape;
  const BiasLayout& layout = args.bias_layout;
  const int64_t num_sums = shape.batch * shape.num_q_heads * shape.k_len;
  auto* sums = static_cast<float*>(workspace);
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
  const unsigned num_blocks = static_cast<unsigned>(shape.batch * shape.q_len);
  ZeroHiddenKernel<<<num_blocks, kThreads, 0, stream>>>(
      HiddenArgs{shape, args.slices, static_cast<uint16_t*>(args.dbias)});
  return cudaGetLastError();
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
    const int64_t num_blocks = std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, 132 * 8);
    SumByKeyKernel<<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(sum);
  }
  if (gradients.key_moments != nullptr) {
    const unsigned num_blocks = static_cast<unsigned>(shape.batch * shape.num_q_heads);
    SumSlopesKernel<<<num_blocks, kThreads, 0, stream>>>(gradients.key_moments, args.dslopes,
                                                         shape.k_len);
  }
  return cudaGetLastError();
}

}  // namespace jax_magi::cuda
