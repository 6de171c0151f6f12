#include "cc/cuda/schedule.h"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kNumBins = 1024;  // Tiles are sorted by number of blocks; longer ones share a bin.

__device__ QueryTile MakeTile(const AttentionShape& shape, int block_m, int block_n,
                              const Slice* slices, int index) {
  const int tiles_per_batch = (shape.q_len + block_m - 1) / block_m;
  QueryTile tile{};
  tile.batch = index / tiles_per_batch;
  tile.q_begin = index % tiles_per_batch * block_m;
  tile.num_rows = Min(block_m, shape.q_len - tile.q_begin);
  slices += shape.shared_slices ? 0 : tile.batch * shape.num_slices;
  for (int i = 0; i < shape.num_slices; ++i) {
    const Slice slice = ClampSlice(slices[i], shape.q_len, shape.k_len);
    const Range rows =
        Intersect({tile.q_begin, tile.q_begin + tile.num_rows}, {slice.q_begin, slice.q_end});
    if (rows.begin >= rows.end) continue;
    const Range keys = TouchedKeys(slice, rows);
    if (keys.begin >= keys.end) continue;
    if (tile.num_blocks == 0) tile.slice_begin = i;
    tile.slice_end = i + 1;
    tile.num_blocks += (keys.end - keys.begin + block_n - 1) / block_n;
  }
  return tile;
}

// One block: a counting sort.
__global__ void __launch_bounds__(kThreads)
    ScheduleKernel(AttentionShape shape, int block_m, int block_n, int num_tiles,
                   const Slice* slices, ScheduleHeader* header, float* max_logits) {
  __shared__ int bins[kNumBins];
  QueryTile* sorted = reinterpret_cast<QueryTile*>(header + 1);
  QueryTile* unsorted = sorted + num_tiles;
  const int thread = threadIdx.x;
  if (thread == 0) header->next_work = 0;
  for (int i = thread; i < shape.batch * shape.num_q_heads; i += kThreads) {
    max_logits[i] = -INFINITY;
  }
  bins[thread] = 0;
  __syncthreads();

  // Bin 0 holds the heaviest.
  auto bin_of = [](const QueryTile& tile) {
    return kNumBins - 1 - Min(tile.num_blocks, kNumBins - 1);
  };
  for (int i = thread; i < num_tiles; i += kThreads) {
    const QueryTile tile = MakeTile(shape, block_m, block_n, slices, i);
    unsorted[i] = tile;
    atomicAdd(&bins[bin_of(tile)], 1);
  }
  __syncthreads();

  // Inclusive sum over bins, then back to where each begins.
  const int count = bins[thread];
  for (int step = 1; step < kNumBins; step *= 2) {
    const int other = thread >= step ? bins[thread - step] : 0;
    __syncthreads();
    bins[thread] += other;
    __syncthreads();
  }
  bins[thread] -= count;
  __syncthreads();
  for (int i = thread; i < num_tiles; i += kThreads) {
    const QueryTile tile = unsorted[i];
    sorted[atomicAdd(&bins[bin_of(tile)], 1)] = tile;
  }
}

}  // namespace

cudaError_t MakeSchedule(const AttentionShape& shape, int block_m, int block_n, const Slice* slices,
                         void* workspace, float* max_logits, cudaStream_t stream) {
  static_assert(kThreads == kNumBins, "a thread a bin");
  const int num_tiles = shape.batch * ((shape.q_len + block_m - 1) / block_m);
  ScheduleKernel<<<1, kThreads, 0, stream>>>(shape, block_m, block_n, num_tiles, slices,
                                             static_cast<ScheduleHeader*>(workspace), max_logits);
  return cudaGetLastError();
}

}  // namespace jax_magi::cuda
