#include "cc/cuda/attention/early_launch.cuh"
#include "cc/cuda/attention/instructions.cuh"
#include "cc/cuda/attention/tile_cuts.h"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {
namespace {

// Makes the sorted list of segments and returns their number. Each thread handles one candidate;
// `rows` and `kept` are scratch.
__device__ int MakeSegments(const CutArgs& args, Segment* segments, int* rows, int* kept) {
  const int per_batch = args.candidates_per_list.divisor;
  const int num_candidates = args.num_lists * per_batch;
  const int thread = threadIdx.x;
  const int batch = args.candidates_per_list.Divide(thread);
  const int first = batch * per_batch;  // The first candidate of this batch element.
  const int index = thread - first;
  const bool is_candidate = thread < num_candidates;
  if (is_candidate) {
    rows[thread] = CutRow(args, args.list(batch), index);
  }
  __syncthreads();

  const int row = is_candidate ? rows[thread] : 0;
  bool is_kept = is_candidate && (index == 0 || row > 0);
  int previous = 0;  // The candidate row before this one.
  for (int i = 0; is_kept && index > 0 && i < per_batch; ++i) {
    const int other = rows[first + i];
    if (other < row) previous = Max(previous, other);
    if (other == row && i < index) is_kept = false;  // A duplicate.
  }
  if (index > 0 && !IsCutKept(previous, row)) is_kept = false;
  kept[thread] = is_kept;
  const int num_segments = __syncthreads_count(is_kept);

  int rank = 0, next = args.num_rows, first_tile = 0;
  if (is_kept) {
    for (int i = 0; i < num_candidates; ++i) {
      if (!kept[i]) continue;
      const bool is_same = i >= first && i < first + per_batch;
      if (i < first || (is_same && rows[i] < row)) ++rank;
      if (is_same && rows[i] > row) next = Min(next, rows[i]);
    }
    segments[rank] = {batch, row, next, 0, args.tile_rows.CeilDivide(next - row)};
  }
  __syncthreads();
  if (is_kept) {
    for (int i = 0; i < rank; ++i) first_tile += segments[i].num_tiles;
  }
  __syncthreads();
  if (is_kept) segments[rank].first_tile = first_tile;
  __syncthreads();
  return num_segments;
}

// The sum over the threads before this one. `scratch` holds 32 elements.
__device__ int SumBefore(int x, int* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sum = SumUpToLane(x);
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int before = 0;  // Sum over the warps before this one.
  for (int i = 0; i < warp; ++i) before += scratch[i];
  return before + sum - x;
}

// The sort key: tiles with most blocks first; all tiles of kNumBins - 1 blocks or more share the
// first bin.
template <int kNumBins>
__device__ int BinOf(const Tile& tile) {
  return kNumBins - 1 - Min(tile.num_blocks, kNumBins - 1);
}

// This kernel may have started before the previous one ended. The next one may start now: it waits
// for this kernel where it must, and all kernels before this one have ended.
__device__ void LetKernelsOverlap() {
  WaitForPreviousKernel();
  LetNextKernelStart();
}

__global__ void ResetKernel(ListCheck check, WorkCounter* counter, int num_part_counters,
                            float* max_logits, int num_max_logits) {
  LetKernelsOverlap();
  for (int i = threadIdx.x; i < num_max_logits; i += blockDim.x) max_logits[i] = -INFINITY;
  auto* part_counters = reinterpret_cast<int32_t*>(counter + 1);
  for (int i = threadIdx.x; i < num_part_counters; i += blockDim.x) part_counters[i] = 0;
  if (threadIdx.x == 0) {
    counter->next_work = counter->next_hidden = 0;
    check.Check();
  }
}

// One CTA cuts rows into tiles, then sorts them with a counting sort, one bin per thread.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    TileListKernel(CutArgs args, ListKey key, TileList* list, Tile* unsorted) {
  __shared__ int bins[kThreads], rows[kThreads];
  __shared__ Segment segments[kThreads];
  const int thread = threadIdx.x;
  LetKernelsOverlap();

  // With too many candidates, every slice list becomes a single segment.
  const bool is_cut = args.num_candidates() <= kThreads;
  int num_segments = 0;
  const int tiles_per_list = args.tile_rows.CeilDivide(args.num_rows);
  int num_tiles = args.num_lists * tiles_per_list;
  if (is_cut) {
    num_segments = MakeSegments(args, segments, rows, bins);
    const Segment& last = segments[num_segments - 1];
    num_tiles = last.first_tile + last.num_tiles;
  }
  if (thread == 0) {
    list->num_tiles = num_tiles;
    list->key = key;
  }
  __syncthreads();
  bins[thread] = 0;
  __syncthreads();

  const auto make_tile = [&](int i) {
    Segment segment;
    if (is_cut) {
      int low = 0;  // The last segment that begins at or before this tile.
      for (int high = num_segments; high - low > 1;) {
        const int middle = (low + high) / 2;
        (segments[middle].first_tile <= i ? low : high) = middle;
      }
      segment = segments[low];
    } else {
      const int list = i / tiles_per_list;
      segment = {list, 0, args.num_rows, list * tiles_per_list, tiles_per_list};
    }
    const Tile tile = CutTile(args, segment, i);
    atomicAdd(&bins[BinOf<kThreads>(tile)], 1);
    return tile;
  };
#if __CUDA_ARCH__ >= 900
  constexpr int kFirst = kThreads;  // A thread's first tile stays in registers.
#else
  constexpr int kFirst = 0;  // For older GPUs, ptxas would spill it.
#endif
  for (int i = thread + kFirst; i < num_tiles; i += kThreads) unsorted[i] = make_tile(i);
  Tile own{};
  if (kFirst > 0 && thread < num_tiles) own = make_tile(thread);
  __syncthreads();
  const int count = bins[thread];
  const int before = SumBefore(count, rows);
  bins[thread] = before;  // The position of the bin's first tile.
  for (int i = 0; i < kNumThresholds; ++i) {
    static_assert(ThresholdBlocks(0) < kThreads, "the first bin has tiles of any number of blocks");
    // All bins before this one hold tiles with as many blocks or more.
    if (thread == kThreads - ThresholdBlocks(i)) list->num_above[i] = before;
  }
  __syncthreads();
  // Tiles of a bin keep the order in which they were cut, so that the list is always the same:
  // warps take turns.
  for (int i = thread; i - thread < num_tiles; i += kThreads) {
    const bool is_tile = i < num_tiles;
    Tile tile = i < kFirst || !is_tile ? own : unsorted[i];
    const int bin = is_tile ? BinOf<kThreads>(tile) : -1;
    const unsigned same = __match_any_sync(~0u, bin);
    const unsigned before = same & ((1u << thread % 32) - 1);
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      if (thread / 32 == warp && is_tile) tile.index = bins[bin] + __popc(before);
      __syncwarp();
      if (thread / 32 == warp && is_tile && before == 0) bins[bin] += __popc(same);
      __syncthreads();
    }
    if (is_tile) list->tiles()[tile.index] = tile;
    if (is_tile && tile.index == num_tiles - 1) list->least_blocks = tile.num_blocks;
  }
}

}  // namespace

Status MakeTileList(const AttentionShape& shape, const Tiling& tiling, const Slice* slices,
                    TileList* list, cudaStream_t stream) {
  const CutArgs args(shape, tiling, slices);
  // The attention kernel waits for the list, and a small CTA is faster when it suffices.
  constexpr int kFew = 128, kMany = 1024;
  const bool is_small = args.num_candidates() <= kFew && MaxTiles(shape, tiling) <= kFew &&
                        CeilDiv(args.num_columns, tiling.num_columns) < kFew;
  const auto kernel = is_small ? TileListKernel<kFew> : TileListKernel<kMany>;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(LaunchEarly(kernel, 1, is_small ? kFew : kMany, 0, stream, args,
                                            KeyOf(shape, tiling), list,
                                            list->tiles() + MaxTiles(shape, tiling)));
  return {};
}

Status ResetWork(const AttentionShape& shape, const ListCheck& check, WorkCounter* counter,
                 int num_part_counters, float* max_logits, cudaStream_t stream) {
  const int num_max_logits =
      max_logits == nullptr ? 0 : static_cast<int>(shape.batch * shape.num_q_heads);
  JAX_MAGI_CUDA_RETURN_IF_ERROR(LaunchEarly(ResetKernel, 1, 128, 0, stream, check, counter,
                                            num_part_counters, max_logits, num_max_logits));
  return {};
}

}  // namespace jax_magi::cuda
