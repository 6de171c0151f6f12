// How the forward kernels reduce the parts of a tile: see key_parts.h.

#ifndef JAX_MAGI_CUDA_ATTENTION_JOIN_PARTS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_JOIN_PARTS_CUH_

#include "cc/cuda/attention/instructions.cuh"
#include "cc/cuda/attention/key_parts.cuh"
#include "cc/cuda/attention/online_softmax.cuh"

namespace jax_magi::cuda {

// Named barriers of the forward kernels. Barrier 0 is that of __syncthreads().
enum ForwardBarrier {
  // One per group of 64 rows, whose threads all arrive and wait: first when their part's results
  // are stored, then to learn from thread 0 whether it was the last part.
  kPartStored = 1,
};

// Reduces the parts of a tile, for one group of 64 rows, which kPartThreads threads hold.
template <typename Config>
struct PartJoiner {
  static constexpr int kWords = PartWords(Config::kValueDim);
  const PartsParams& params;
  int part, group, thread;

  __device__ __forceinline__ int NumParts() const { return part >> 16; }
  __device__ __forceinline__ int Number() const { return part & 0xffff; }
  // The index of the tile among those that are split.
  __device__ __forceinline__ int TileNumber() const { return Number() / NumParts(); }
  __device__ __forceinline__ int First() const { return TileNumber() * NumParts(); }

  // The index of this group's share of a part or tile: each CTA of a cluster has room for
  // `count` shares.
  __device__ __forceinline__ int Place(int number, int count) const {
    int place = number * Config::kNumConsumers + group;
    if constexpr (Config::kClusterSize > 1) place += static_cast<int>(ClusterRank()) * count;
    return place;
  }

  // The words of this thread's share of a part.
  __device__ __forceinline__ float4* Words(int number) const {
    const int place = Place(number, kMaxParts / 2 * Config::kNumConsumers);
    return params.parts + int64_t{place} * kWords * kPartThreads + thread;
  }

  // Stores this part's partial results. Returns whether all parts have stored theirs.
  __device__ __forceinline__ bool Leave(const float (&acc)[Config::kValueDim / 2],
                                        const RowState& state) const {
    float4* words = Words(Number());
#pragma unroll
    for (int i = 0; i < kWords - 2; ++i) {
      words[i * kPartThreads] =
          make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
    }
    words[(kWords - 2) * kPartThreads] =
        make_float4(state.reference[0], state.reference[1], state.sum[0], state.sum[1]);
    words[(kWords - 1) * kPartThreads] = make_float4(state.max[0], state.max[1], 0.0f, 0.0f);
    NamedSync(kPartStored + group, kPartThreads);
    bool is_last = false;
    if (thread == 0) {
      int32_t* counter = params.counters + Place(TileNumber(), kMaxPartCounters / 2);
      // On behalf of the whole group: its writes come before the addition, its reads after.
      is_last = AddInOrder(counter, 1) == NumParts() - 1;
    }
    return NamedAny(kPartStored + group, kPartThreads, is_last);
  }

  // Reduces the partial results of all parts.
  __device__ __forceinline__ void Join(float (&acc)[Config::kValueDim / 2], RowState& state) const {
    float reference[2] = {kNoReference, kNoReference};
#pragma unroll
    for (int r = 0; r < 2; ++r) state.max[r] = -INFINITY, state.sum[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) acc[i] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < NumParts(); ++i) {
      const float4* words = Words(First() + i) + (kWords - 2) * kPartThreads;
      const float4 sums = __ldcg(words), max = __ldcg(words + kPartThreads);
      reference[0] = MaxOrNan(reference[0], sums.x);
      reference[1] = MaxOrNan(reference[1], sums.y);
      state.max[0] = MaxOrNan(state.max[0], max.x);
      state.max[1] = MaxOrNan(state.max[1], max.y);
    }
    // The compiler moves the loads of an iteration to its beginning.
    constexpr int kChunk = Config::kLoadsInChunks ? 16 : kWords - 2;
    static_assert((kWords - 2) % kChunk == 0, "whole chunks");
#pragma unroll
    for (int first = 0; first < kWords - 2; first += kChunk) {
#pragma unroll 1
      for (int i = 0; i < NumParts(); ++i) {
        const float4* words = Words(First() + i);
        const float4 sums = __ldcg(words + (kWords - 2) * kPartThreads);
        // A part without a reference has only zeros.
        const float weight[2] = {Exp2(sums.x - reference[0]), Exp2(sums.y - reference[1])};
        if (first == 0) {
          state.sum[0] += weight[0] * sums.z;
          state.sum[1] += weight[1] * sums.w;
        }
#pragma unroll
        for (int j = first; j < first + kChunk; ++j) {
          const float4 word = __ldcg(words + j * kPartThreads);
          acc[4 * j] += weight[0] * word.x;
          acc[4 * j + 1] += weight[0] * word.y;
          acc[4 * j + 2] += weight[1] * word.z;
          acc[4 * j + 3] += weight[1] * word.w;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) state.reference[r] = reference[r];
  }
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_JOIN_PARTS_CUH_
