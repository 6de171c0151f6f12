#include <algorithm>

#include "cc/cuda/arithmetic.cuh"
#include "cc/cuda/attention/backward_prepare.h"
#include "cc/cuda/attention/early_launch.cuh"
#include "cc/cuda/launch.h"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 8;  // Vectors of zeros. Not tuned.

struct PrepareArgs {
  const float *lse, *delta;  // [batch, q_len, num_q_heads]
  QueryStatistic* statistics;
  uint32_t q_len, num_eights, num_q_heads;  // A QueryStatistic covers eight queries.
  uint32_t num_statistics, num_statistic_blocks;
  float4* zeros;
  int64_t num_zero_vectors;
  uint32_t num_zero_blocks;
  AddedTiles added;
  uint32_t num_repeats;             // Number of batch elements that a tile of the list applies to.
  uint32_t k_len;                   // Rows per batch element.
  float4 *dk, *dv;                  // [batch, k_len, row]
  uint32_t dk_vectors, dv_vectors;  // Per row, which has all kv heads.
  WorkCounter* counter;
  ListCheck check;
};

// The number of CTAs per SM that zero-fill the rows of added tiles, independent of the number of
// tiles, and the rows that a CTA fills at a time. Enough for a memory of 5 TB/s; not tuned.
constexpr int kAddedBlocksOfSm = 4, kRowsAtOnce = 8;

// Adjacent threads handle the same eight queries of adjacent heads, which are adjacent in lse.
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

__device__ __forceinline__ void FillWithZeros(float4* first, uint32_t num_vectors) {
  for (uint32_t i = threadIdx.x; i < num_vectors; i += kThreads) {
    first[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// `block` is the CTA's index among those at the end of the grid that do this.
__device__ __forceinline__ void ClearAddedTiles(const PrepareArgs& args, uint32_t block) {
  const AddedTiles& added = args.added;
  const uint32_t num_blocks = gridDim.x - args.num_statistic_blocks - args.num_zero_blocks;
  const uint32_t per_tile = CeilDiv(added.tile_rows, kRowsAtOnce);
  const TileList& list = *added.list;
  const int num_added =
      added.weights.NumTiles(list, added.weights.FirstThreshold(list), added.num_weights - 1);
  const uint32_t num_tiles = Clamp(num_added, 0, args.check.max_tiles) * args.num_repeats;
  for (uint32_t i = block; i < num_tiles * per_tile; i += num_blocks) {
    const uint32_t index = i / per_tile, repeat = index % args.num_repeats;
    Tile tile = list.tiles()[index / args.num_repeats];
    ClampTile(args.check.key.num_lists, static_cast<int>(args.k_len), args.check.key.num_slices,
              tile);
    const int skipped = static_cast<int>(i % per_tile) * kRowsAtOnce;
    const int num_rows = Min(tile.num_rows - skipped, kRowsAtOnce);
    if (num_rows <= 0) continue;
    const int64_t row = int64_t{tile.batch + repeat} * args.k_len + tile.begin + skipped;
    FillWithZeros(args.dk + row * args.dk_vectors, num_rows * args.dk_vectors);
    FillWithZeros(args.dv + row * args.dv_vectors, num_rows * args.dv_vectors);
  }
}

__global__ void __launch_bounds__(kThreads) PrepareBackwardKernel(PrepareArgs args) {
  // This kernel may have started before the previous one ended, and the next may start now.
  WaitForPreviousKernel();
  LetNextKernelStart();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.counter->next_work = args.counter->next_hidden = 0;
    args.check.Check();
  }
  if (blockIdx.x < args.num_statistic_blocks) {
    MakeStatistic(args);
    return;
  }
  const uint32_t block = blockIdx.x - args.num_statistic_blocks;
  if (block >= args.num_zero_blocks) {
    ClearAddedTiles(args, block - args.num_zero_blocks);
    return;
  }
  const int64_t first = int64_t{block} * (kThreads * kVectorsPerThread) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector < args.num_zero_vectors) args.zeros[vector] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace

cudaError_t PrepareBackward(const BackwardArgs& args, const ListCheck& check,
                            const ZeroBytes& zeros, const AddedTiles& added,
                            QueryStatistic* statistics, WorkCounter* counter, cudaStream_t stream) {
  const AttentionShape& shape = args.shape;
  const auto num_eights = static_cast<uint32_t>(PaddedQueries(shape.q_len) / 8);
  const auto num_q_heads = static_cast<uint32_t>(shape.num_q_heads);
  const auto num_statistics = static_cast<uint32_t>(shape.batch) * num_q_heads * num_eights;
  const uint32_t num_statistic_blocks = CeilDiv(num_statistics, kThreads);
  constexpr int kVectors = kThreads * kVectorsPerThread;
  const int64_t num_zero_vectors = zeros.num_bytes / static_cast<int64_t>(sizeof(float4));
  const int64_t num_zero_blocks = (num_zero_vectors + kVectors - 1) / kVectors;
  const auto row_vectors = [&](int64_t dim) {
    return static_cast<uint32_t>(shape.num_kv_heads * dim * sizeof(float) / sizeof(float4));
  };
  const PrepareArgs prepare{args.lse,
                            args.delta,
                            statistics,
                            static_cast<uint32_t>(shape.q_len),
                            num_eights,
                            num_q_heads,
                            num_statistics,
                            num_statistic_blocks,
                            static_cast<float4*>(zeros.data),
                            num_zero_vectors,
                            static_cast<uint32_t>(num_zero_blocks),
                            added,
                            shape.shared_slices ? static_cast<uint32_t>(shape.batch) : 1,
                            static_cast<uint32_t>(shape.k_len),
                            static_cast<float4*>(args.dk),
                            static_cast<float4*>(args.dv),
                            row_vectors(shape.head_dim),
                            row_vectors(shape.value_dim),
                            counter,
                            check};
  int64_t num_added_blocks = 0;
  if (added.num_weights > 0) {
    int num_sms;
    const cudaError_t code = GetNumSms(&num_sms);
    if (code != cudaSuccess) return code;
    num_added_blocks = std::min<int64_t>(kAddedBlocksOfSm * num_sms,
                                         shape.batch * CeilDiv(prepare.k_len, kRowsAtOnce));
  }
  // At least one CTA: it resets the counter.
  const int64_t num_blocks =
      std::max<int64_t>(num_statistic_blocks + num_zero_blocks + num_added_blocks, 1);
  return LaunchEarly(PrepareBackwardKernel, static_cast<int>(num_blocks), kThreads, 0, stream,
                     prepare);
}

}  // namespace jax_magi::cuda
