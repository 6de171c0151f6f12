// The forward kernel's epilogue: a consumer warpgroup stores its part of a tile to global memory.

#ifndef JAX_MAGI_CUDA_ATTENTION_FORWARD_EPILOGUE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_FORWARD_EPILOGUE_CUH_

#include "cc/cuda/attention/early_launch.cuh"
#include "cc/cuda/attention/instructions.cuh"
#include "cc/cuda/attention/online_softmax.cuh"
#include "cc/cuda/attention/store.cuh"
#include "cc/cuda/attention/tile_info.h"

namespace jax_magi::cuda {

template <typename Config, typename Consumer>
struct ForwardEpilogue {
  using Element = typename Config::Element;
  // Whether calls may have running results. These act like one more key, whose logit is their lse,
  // in place of the sink, and whose value is their output.
  static constexpr bool kMayMerge = Config::kIsOutFloat && !Config::kHasTerms;
  Consumer& consumer;

  // One of a thread's two rows.
  struct Row {
    bool is_own;     // Whether the tile has this row.
    int batch_head;  // Index in [batch, num_q_heads].
    int64_t offset;  // Index of (batch, row, head) in [batch, q_len, num_q_heads].
  };

  __device__ __forceinline__ Row RowOf(const TileInfo& tile, int r) const {
    const auto& params = consumer.params;
    const int log2_pack = consumer.Log2PackOf(tile), packed_row = consumer.PackedRow(r);
    const int row = packed_row >> log2_pack, in_pack = packed_row & ((1 << log2_pack) - 1);
    const bool is_own = row < tile.num_rows && in_pack < tile.num_heads;
    const int head = tile.head + (is_own ? in_pack : 0);
    const int64_t position = int64_t{tile.batch} * params.q_len + tile.begin + row;
    return {is_own, tile.batch * params.num_q_heads + head, position * params.num_q_heads + head};
  }

  // Called during a tile's last product, which hides a memory latency that is half as long as all
  // the rest.
  __device__ __forceinline__ void LoadSinks(const TileInfo& tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row row = RowOf(tile, r);
      const float* from = consumer.params.sink + row.batch_head;
      if (IsRunning() && row.is_own) {
        from = consumer.params.lse + row.offset;
        PrefetchRow(row);
      }
      consumer.sinks[r] = *from;
    }
  }

  __device__ __forceinline__ bool IsRunning() const {
    if constexpr (kMayMerge) return consumer.params.running_out != nullptr;
    return false;
  }

  // Prefetches the row to merge with to L2. The threads of a quad share it.
  __device__ __forceinline__ void PrefetchRow(const Row& row) const {
    constexpr int kLine = 128 / sizeof(float);
    const int value_dim = consumer.params.value_dim;
    const float* running = consumer.params.running_out + row.offset * value_dim;
    for (int i = consumer.thread % 4 * kLine; i < value_dim; i += 4 * kLine)
      PrefetchL2(running + i);
  }

  // There are no branches before the output is being stored, so that the latencies of both rows
  // overlap.
  __device__ __forceinline__ void Store(const TileInfo& tile) {
    const auto& params = consumer.params;
    const RowState& state = consumer.state;
    Row rows[2] = {RowOf(tile, 0), RowOf(tile, 1)};
    float factor[2], lse[2];
    float running_factor[2];  // The factor of the running results.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sink = kLog2E * consumer.sinks[r];
      const float sum = QuadSum(state.sum[r]);
      const float reference = state.reference[r] == kNoReference ? -INFINITY : state.reference[r];
      const float largest = fmaxf(reference, sink);
      const float weight = largest == -INFINITY ? 0.0f : Exp2(reference - largest);
      const float sink_weight = largest == -INFINITY ? 0.0f : Exp2(sink - largest);
      const float total = sum * weight + sink_weight;
      factor[r] = total == 0.0f ? 0.0f : weight * Reciprocal(total);
      lse[r] = total == 0.0f ? -INFINITY : (largest + __log2f(total)) * kLn2;
      if constexpr (kMayMerge) {
        running_factor[r] = total == 0.0f ? 0.0f : sink_weight * Reciprocal(total);
        // Fully masked rows keep their running values bit for bit.
        if (IsRunning() && reference == -INFINITY) lse[r] = consumer.sinks[r];
        if (params.keeps_rows && reference == -INFINITY) rows[r].is_own = false;
      }
    }
    StoreOutput(rows, factor, running_factor);
    if (consumer.thread % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (rows[r].is_own) params.lse[rows[r].offset] = lse[r];
      }
    }
    WaitForPreviousKernel();  // The previous kernel resets max_logits.
    ReportMaxLogits(tile, rows);
  }

  __device__ __forceinline__ void StoreOutput(const Row (&rows)[2], float (&factor)[2],
                                              const float (&running_factor)[2]) {
    const auto& params = consumer.params;
    const bool is_own[2] = {rows[0].is_own, rows[1].is_own};
    const int64_t first[2] = {rows[0].offset * params.value_dim, rows[1].offset * params.value_dim};
    if constexpr (kMayMerge) {
      if (IsRunning()) {
        const float* const from[2] = {params.running_out + first[0], params.running_out + first[1]};
        MergeFloatRows<Config::kValueDim, Config::kLoadsInChunks>(
            consumer.acc, factor, running_factor, from, is_own, params.value_dim, consumer.thread);
        factor[0] = factor[1] = 1.0f;
      }
    }
    if (IsOutFloat()) {
      float* out = static_cast<float*>(params.out);
      float* const to[2] = {out + first[0], out + first[1]};
      StoreFloatRows<Config::kValueDim>(consumer.acc, factor, to, is_own, params.value_dim,
                                        consumer.thread);
    } else {
      Element* out = static_cast<Element*>(params.out);
      Element* const to[2] = {out + first[0], out + first[1]};
      StoreRows<Element, Config::kValueDim>(consumer.acc, factor, to, is_own, params.value_dim,
                                            consumer.thread);
    }
  }

  __device__ __forceinline__ bool IsOutFloat() const {
    if constexpr (Config::kHasTerms) return consumer.params.is_out_float;
    if constexpr (kMayMerge) return !consumer.params.is_rounded;
    return false;
  }

  __device__ __forceinline__ void ReportMaxLogits(const TileInfo& tile, const Row (&rows)[2]) {
    const int thread = consumer.thread;
    float max[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = rows[r].is_own ? consumer.state.max[r] : -INFINITY;
    if (consumer.Log2PackOf(tile) == 0) {  // A warp has one head.
      float largest = MaxOrNan(max[0], max[1]);
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        largest = MaxOrNan(largest, __shfl_xor_sync(~0u, largest, lanes));
      }
      if (thread % 32 == 0) ReportMaxLogit(largest, rows[0].batch_head);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float largest = QuadMax(max[r]);
        if (thread % 4 == 0) ReportMaxLogit(largest, rows[r].batch_head);
      }
    }
  }

  __device__ __forceinline__ void ReportMaxLogit(float largest, int batch_head) {
    if (largest == -INFINITY) return;
    // Read as integers, floats of the same sign are ordered, and a positive NaN is above all
    // others. A NaN logit must not look like a healthy head, and -0 must not become the smallest of
    // all.
    const float scale = Config::kHasTerms ? 1.0f : consumer.params.softmax_scale;
    const float value = isnan(largest) ? __int_as_float(0x7fc00000) : largest * scale + 0.0f;
    float* destination = consumer.params.max_logits + batch_head;
    if (!(value < 0.0f)) {
      atomicMax(reinterpret_cast<int*>(destination), __float_as_int(value));
    } else {
      atomicMin(reinterpret_cast<unsigned*>(destination), __float_as_uint(value));
    }
  }
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_FORWARD_EPILOGUE_CUH_
