#include <algorithm>

#include "cc/cuda/early_launch.h"
#include "cc/cuda/hopper.cuh"
#include "cc/cuda/schedule.h"

namespace jax_magi::cuda {
namespace {

struct ScheduleArgs {
  int num_lists;  // Slice lists: one for each batch element, or one for all.
  int num_rows, num_columns, num_slices;
  bool by_keys;
  Divisor tile_rows, block_columns;
  Divisor candidates_per_list;  // For cuts: the first row, and both ends of each slice.
  const Slice* slices;
};

JAX_MAGI_INLINE int64_t NumCandidates(const ScheduleArgs& args) {
  return int64_t{args.num_lists} * args.candidates_per_list.divisor;
}

// Rows between two cuts.
struct Segment {
  int batch, begin, end;
  int first_tile, num_tiles;
};

// Row of candidate `index` for a cut: 0 for the first, then both ends of each slice. 0 also stands
// for no cut.
JAX_MAGI_INLINE int CutRow(const Slice* slices, int num_rows, int num_columns, bool by_keys,
                           int index) {
  if (index == 0) return 0;
  const Slice slice = LoadSlice(slices, (index - 1) / 2, num_rows, num_columns, by_keys);
  if (slice.q_begin >= slice.q_end || slice.k_begin >= slice.k_end) return 0;
  const int row = (index - 1) % 2 ? slice.q_end : slice.q_begin;
  return row < num_rows ? row : 0;
}

// Makes the sorted list of segments: a thread a candidate.
// Returns their number. `rows` and `kept` are scratch.
__device__ int MakeSegments(const ScheduleArgs& args, Segment* segments, int* rows, int* kept) {
  const int per_batch = args.candidates_per_list.divisor;
  const int num_candidates = args.num_lists * per_batch;
  const int thread = threadIdx.x;
  const int batch = args.candidates_per_list.Divide(thread);
  const int first = batch * per_batch;  // Of this batch element's candidates.
  const int index = thread - first;
  const bool is_candidate = thread < num_candidates;
  if (is_candidate) {
    rows[thread] = CutRow(args.slices + batch * args.num_slices, args.num_rows, args.num_columns,
                          args.by_keys, index);
  }
  __syncthreads();

  const int row = is_candidate ? rows[thread] : 0;
  bool is_kept = is_candidate && (index == 0 || row > 0);
  int previous = 0;  // The cut before this one.
  for (int i = 0; is_kept && index > 0 && i < per_batch; ++i) {
    const int other = rows[first + i];
    if (other < row) previous = Max(previous, other);
    if (other == row && i < index) is_kept = false;  // The same cut twice.
  }
  if (index > 0 && row - previous < kShortestSegment) is_kept = false;
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

// The sum over threads before this one. `scratch` holds 32.
__device__ int SumBefore(int x, int* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int before = 0;  // Warps before this one.
  for (int i = 0; i < warp; ++i) before += scratch[i];
  return before + sum - x;
}

// Tiles are sorted by number of blocks; longer ones share the first bin.
template <int kNumBins>
__device__ int BinOf(const Tile& tile) {
  return kNumBins - 1 - Min(tile.num_blocks, kNumBins - 1);
}

__device__ void Reset(WorkCounter* counter, float* max_logits, int num_max_logits) {
  // This kernel came up while the one before it ended. The attention kernel may come up now: it
  // waits for this one where it must, and all before it have ended.
  WaitForPreviousKernel();
  LetNextKernelStart();
  for (int i = threadIdx.x; i < num_max_logits; i += blockDim.x) max_logits[i] = -INFINITY;
  if (threadIdx.x == 0) counter->next_work = 0;
}

__global__ void ResetKernel(WorkCounter* counter, float* max_logits, int num_max_logits) {
  Reset(counter, max_logits, num_max_logits);
}

// One block of threads: cuts rows into tiles, then sorts them by counting, a thread a bin.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    ScheduleKernel(ScheduleArgs args, WorkCounter* counter, Tile* unsorted, float* max_logits,
                   int num_max_logits) {
  __shared__ int bins[kThreads], rows[kThreads];
  __shared__ Segment segments[kThreads];
  Reset(counter, max_logits, num_max_logits);
  TileList* list = reinterpret_cast<TileList*>(counter + 1);
  const int thread = threadIdx.x, num_rows = args.tile_rows.divisor;

  // Too many candidates, and every list is one segment.
  const bool is_cut = NumCandidates(args) <= kThreads;
  int num_segments = 0;
  const int tiles_per_list = args.tile_rows.CeilDivide(args.num_rows);
  int num_tiles = args.num_lists * tiles_per_list;
  if (is_cut) {
    num_segments = MakeSegments(args, segments, rows, bins);
    const Segment& last = segments[num_segments - 1];
    num_tiles = last.first_tile + last.num_tiles;
  }
  if (thread == 0) list->num_tiles = num_tiles;
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
    Tile tile{};
    tile.batch = segment.batch;
    tile.begin = segment.begin + (i - segment.first_tile) * num_rows;
    tile.num_rows = Min(num_rows, segment.end - tile.begin);
    CountBlocks(args.slices + int64_t{tile.batch} * args.num_slices, args.num_slices, args.num_rows,
                args.num_columns, args.by_keys, args.block_columns, tile);
    atomicAdd(&bins[BinOf<kThreads>(tile)], 1);
    return tile;
  };
  for (int i = thread + kThreads; i < num_tiles; i += kThreads) unsorted[i] = make_tile(i);
  // A thread's first tile needs no memory.
  Tile own{};
  if (thread < num_tiles) own = make_tile(thread);
  __syncthreads();
  const int count = bins[thread];
  bins[thread] = SumBefore(count, rows);  // To where each begins.
  __syncthreads();
  const auto put = [&](const Tile& tile) {
    list->tiles()[atomicAdd(&bins[BinOf<kThreads>(tile)], 1)] = tile;
  };
  if (thread < num_tiles) put(own);
  for (int i = thread + kThreads; i < num_tiles; i += kThreads) put(unsorted[i]);
}

}  // namespace

std::vector<int32_t> MakePlan(const AttentionShape& shape, const Tiling& tiling,
                              const Slice* slices) {
  const int num_rows = NumRows(shape, tiling), num_columns = NumColumns(shape, tiling);
  const int num_slices = static_cast<int>(shape.num_slices);
  std::vector<int> cuts;
  for (int i = 0; i <= 2 * num_slices; ++i) {
    cuts.push_back(CutRow(slices, num_rows, num_columns, tiling.by_keys, i));
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::vector<int> kept{0};
  for (size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i] - cuts[i - 1] >= kShortestSegment) kept.push_back(cuts[i]);
  }
  kept.push_back(num_rows);

  const Divisor block_columns(tiling.num_columns);
  std::vector<Tile> tiles;
  for (size_t i = 0; i + 1 < kept.size(); ++i) {
    for (int begin = kept[i]; begin < kept[i + 1]; begin += tiling.num_rows) {
      Tile tile{};
      tile.begin = begin;
      tile.num_rows = Min(tiling.num_rows, kept[i + 1] - begin);
      CountBlocks(slices, num_slices, num_rows, num_columns, tiling.by_keys, block_columns, tile);
      tiles.push_back(tile);
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Tile& a, const Tile& b) { return a.num_blocks > b.num_blocks; });
  std::vector<int32_t> plan(sizeof(TileList) / 4 + tiles.size() * sizeof(Tile) / 4);
  auto* list = reinterpret_cast<TileList*>(plan.data());
  list->num_tiles = static_cast<int>(tiles.size());
  std::copy(tiles.begin(), tiles.end(), list->tiles());
  return plan;
}

cudaError_t Prepare(const AttentionShape& shape, const Tiling& tiling, const Slice* slices,
                    bool has_plan, void* workspace, float* max_logits, cudaStream_t stream) {
  auto* counter = static_cast<WorkCounter*>(workspace);
  const int num_max_logits =
      max_logits == nullptr ? 0 : static_cast<int>(shape.batch * shape.num_q_heads);
  if (has_plan) {
    return LaunchEarly(ResetKernel, 1, 128, 0, stream, counter, max_logits, num_max_logits);
  }
  const ScheduleArgs args{shape.shared_slices ? 1 : static_cast<int>(shape.batch),
                          NumRows(shape, tiling),
                          NumColumns(shape, tiling),
                          static_cast<int>(shape.num_slices),
                          tiling.by_keys,
                          Divisor(tiling.num_rows),
                          Divisor(tiling.num_columns),
                          Divisor(static_cast<int>(2 * shape.num_slices + 1)),
                          slices};
  Tile* unsorted = reinterpret_cast<TileList*>(counter + 1)->tiles() + MaxTiles(shape, tiling);
  // The attention kernel waits for the list: few threads are the quickest where they are enough.
  constexpr int kFew = 128, kMany = 1024;
  const bool is_small = NumCandidates(args) <= kFew && MaxTiles(shape, tiling) <= kFew &&
                        CeilDiv(args.num_columns, tiling.num_columns) < kFew;
  const auto kernel = is_small ? ScheduleKernel<kFew> : ScheduleKernel<kMany>;
  return LaunchEarly(kernel, 1, is_small ? kFew : kMany, 0, stream, args, counter, unsorted,
                     max_logits, num_max_logits);
}

}  // namespace jax_magi::cuda
