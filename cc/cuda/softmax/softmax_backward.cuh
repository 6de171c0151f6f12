// The backward kernels of the softmax over rows.

#ifndef JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_BACKWARD_CUH_
#define JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_BACKWARD_CUH_

#include "cc/cuda/softmax/softmax_rows.cuh"

namespace jax_magi::cuda {

struct SoftmaxBackwardParams {
  RowsParams rows;
  float scale;
  const void *y, *dy;
  void* dx;
  float* dot;
};

// y and dy of vectors first, first + kThreads, ...
template <typename Element, int kThreads, int kVectors>
struct Gradients {
  static constexpr int kSize = kVectorSize<Element>;
  uint32_t y[kVectors][4], dy[kVectors][4];

  template <Caching kCaching>
  __device__ __forceinline__ void Load(const SoftmaxBackwardParams& params, const Row<kSize>& row,
                                       int first) {
    LoadVectors<Element, kThreads, kCaching>(static_cast<const Element*>(params.y), row, first, y);
    LoadVectors<Element, kThreads, kCaching>(static_cast<const Element*>(params.dy), row, first,
                                             dy);
  }

  __device__ __forceinline__ float Dot(const Row<kSize>& row, int first) const {
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = first + i * kThreads;
      if (!Contains(row.touched, v)) continue;
      const auto product = [&](int e) {
        return GetElement<Element>(y[i], e) * GetElement<Element>(dy[i], e);
      };
      if (Contains(row.clean, v)) {
#pragma unroll
        for (int e = 0; e < kSize; ++e) dot += product(e);
      } else {
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          if (Contains(row.visible, row.Column(v) + e)) dot += product(e);
        }
      }
    }
    return dot;
  }

  template <Caching kCaching>
  __device__ __forceinline__ void Store(const SoftmaxBackwardParams& params, const Row<kSize>& row,
                                        int first, float dot) const {
    StoreVectors<Element, kThreads, kCaching, kVectors>(
        static_cast<Element*>(params.dx), row, first, [&](int i, int e) {
          return params.scale * GetElement<Element>(y[i], e) *
                 (GetElement<Element>(dy[i], e) - dot);
        });
  }
};

// Rows are processed in memory order: there is no mask whose rows could be shared.
template <int kSize, bool kIsWhole, int kThreads>
__device__ __forceinline__ Row<kSize> GetRow(const RowsParams& params, uint32_t row) {
  return GetRow<kSize, kIsWhole>(params, IsActive<kThreads>(params, row), row,
                                 params.is_banded ? params.q_len.Modulo(row) : 0);
}

template <typename Element, bool kIsWhole, int kThreads, int kVectors>
__global__ void __launch_bounds__(BlockThreads(kThreads), MinBlocks(kThreads, 512))
    SoftmaxBackwardKernel(const __grid_constant__ SoftmaxBackwardParams params) {
  const uint32_t index = RowIndex<kThreads>();
  const int thread = threadIdx.x % kThreads;
  const Row<kVectorSize<Element>> row =
      GetRow<kVectorSize<Element>, kIsWhole, kThreads>(params.rows, index);
  Gradients<Element, kThreads, kVectors> gradients;
  const int first = row.touched.begin + thread;
  gradients.template Load<Caching::kPlain>(params, row, first);
  const float dot = SumOfRow<kThreads>(gradients.Dot(row, first));
  if (params.dot != nullptr && thread == 0 && IsActive<kThreads>(params.rows, index)) {
    params.dot[index] = dot;
  }
  // Written together with the other vectors, so that rows are written from end to end.
  StoreHidden<Element, kThreads, Caching::kPlain>(static_cast<Element*>(params.dx), row, thread);
  gradients.template Store<Caching::kPlain>(params, row, first, dot);
}

template <typename Element, int kThreads>
__global__ void __launch_bounds__(kThreads, MinBlocks(kThreads, 512))
    LongSoftmaxBackwardKernel(const __grid_constant__ SoftmaxBackwardParams params) {
  constexpr int kStep = kThreads * kChunkVectors;
  const int thread = threadIdx.x;
  const Row<kVectorSize<Element>> row =
      GetRow<kVectorSize<Element>, /*kIsWhole=*/false, kThreads>(params.rows, blockIdx.x);
  Gradients<Element, kThreads, kChunkVectors> gradients;
  StoreHidden<Element, kThreads, Caching::kFirstOut>(static_cast<Element*>(params.dx), row, thread);
  float dot = 0.0f;
  for (int chunk = row.touched.begin; chunk < row.touched.end; chunk += kStep) {
    gradients.template Load<Caching::kPlain>(params, row, chunk + thread);
    dot += gradients.Dot(row, chunk + thread);
  }
  dot = SumOfRow<kThreads>(dot);
  if (params.dot != nullptr && thread == 0) params.dot[blockIdx.x] = dot;
  for (int chunk = row.touched.begin; chunk < row.touched.end; chunk += kStep) {
    gradients.template Load<Caching::kFirstOut>(params, row, chunk + thread);
    gradients.template Store<Caching::kFirstOut>(params, row, chunk + thread, dot);
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SOFTMAX_SOFTMAX_BACKWARD_CUH_
