#include <algorithm>
#include <climits>

#include "cc/cuda/attention/early_launch.cuh"
#include "cc/cuda/attention/instructions.cuh"
#include "cc/cuda/attention/tile_cuts.h"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {
namespace {

// The sum over the threads before this one, and over all. `sums` holds an element per warp.
template <int kThreads>
__device__ int SumBefore(int x, int* sums, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sum = SumUpToLane(x);
  __syncthreads();  // All threads have read the sums of an earlier call.
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = 0;  // Sum over the warps before this one.
  *total = 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i == warp) before = *total;
    *total += sums[i];
  }
  return before + sum - x;
}

// Memory for cutting rows, an element of each per candidate.
struct CutScratch {
  int *rows, *places;
  Segment* segments;
};

// Whether rows are cut at candidate `i`. Its list begins at candidate `first`.
__device__ bool IsKept(const int* rows, int i, int first, int per_list) {
  const int row = rows[i];
  if (i == first) return true;
  if (row <= 0) return false;
  int previous = 0;  // The candidate row before this one.
  for (int j = first; j < first + per_list; ++j) {
    const int other = rows[j];
    if (other < row) previous = Max(previous, other);
    if (other == row && j < i) return false;  // A duplicate.
  }
  return IsCutKept(previous, row);
}

// Makes the sorted list of segments and returns their number.
template <int kThreads>
__device__ int MakeSegments(const CutArgs& args, const CutScratch& scratch, int* sums) {
  const auto [rows, places, segments] = scratch;
  const int per_list = args.candidates_per_list.divisor;
  const int num_candidates = args.num_lists * per_list;
  const int thread = threadIdx.x;
  for (int i = thread; i < num_candidates; i += kThreads) {
    const int batch = args.candidates_per_list.Divide(i);
    rows[i] = CutRow(args, args.list(batch), i - batch * per_list);
  }
  __syncthreads();

  // The place of a kept candidate among all that are kept; -1 for others.
  int num_segments = 0;
  for (int begin = 0; begin < num_candidates; begin += kThreads) {
    const int i = begin + thread;
    const int first = args.candidates_per_list.Divide(i) * per_list;
    const bool is_kept = i < num_candidates && IsKept(rows, i, first, per_list);
    int total;
    const int before = SumBefore<kThreads>(is_kept, sums, &total);
    if (i < num_candidates) places[i] = is_kept ? num_segments + before : -1;
    num_segments += total;
  }
  __syncthreads();

  for (int i = thread; i < num_candidates; i += kThreads) {
    if (places[i] < 0) continue;
    const int batch = args.candidates_per_list.Divide(i), first = batch * per_list;
    const int row = rows[i];
    // The first candidate of a list is kept, and sorted before the list's others.
    int rank = places[first], next = args.num_rows;
    for (int j = first; j < first + per_list; ++j) {
      if (places[j] < 0) continue;
      if (rows[j] < row) ++rank;
      if (rows[j] > row) next = Min(next, rows[j]);
    }
    segments[rank] = {batch, row, next, 0, args.tile_rows.CeilDivide(next - row)};
  }
  __syncthreads();

  int num_tiles = 0;
  for (int begin = 0; begin < num_segments; begin += kThreads) {
    const int i = begin + thread;
    int total;
    const int before =
        SumBefore<kThreads>(i < num_segments ? segments[i].num_tiles : 0, sums, &total);
    if (i < num_segments) segments[i].first_tile = num_tiles + before;
    num_tiles += total;
  }
  __syncthreads();
  return num_segments;
}

// The sort key: tiles with most blocks first. All tiles of kNumBins - 2 blocks or more share the
// first bin, and the last bin has those that the list lacks.
template <int kNumBins>
__device__ int BinOf(const Tile& tile, Lacks lacks) {
  const bool is_listed = tile.num_blocks > 0 || lacks == Lacks::kNothing ||
                         (lacks == Lacks::kUnmarked && tile.is_marked);
  return is_listed ? kNumBins - 2 - Min(tile.num_blocks, kNumBins - 2) : kNumBins - 1;
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

// How many candidates there are.
enum class Candidates {
  kFew,      // At most one per thread: what is known of them is in shared memory.
  kMany,     // It is in the memory of the list.
  kTooMany,  // It would take too long: every slice list becomes a single segment.
};

// A candidate is compared with all of its list, twice. With 1,024 threads, each makes at most
// 16,384 comparisons.
Candidates CandidatesOf(const CutArgs& args, int num_threads) {
  constexpr int64_t kMostComparisons = 8 << 20;
  const int64_t count = args.num_candidates(), per_list = args.candidates_per_list.divisor;
  if (count <= num_threads) return Candidates::kFew;
  // The memory of the list has a tile, which is larger, for each candidate if there are any rows.
  const bool fits = count <= kMostComparisons && count * per_list <= kMostComparisons;
  return fits && args.num_rows > 0 ? Candidates::kMany : Candidates::kTooMany;
}

// What one CTA makes.
struct ListTask {
  CutArgs args;
  ListKey key;
  TileList* list;
  Tile* unsorted;
};

// One for each CTA.
struct ListTasks {
  static constexpr int kMost = 16;
  ListTask tasks[kMost];
};
static_assert(sizeof(ListTasks) < 4096, "they are kernel parameters");

// Adds up tiles that `num_lanes` neighbouring lanes cut of every num_lanes-th slice each. All lanes
// of a warp call it.
__device__ void JoinTile(int num_lanes, Tile& tile) {
  int begin = tile.num_blocks > 0 ? tile.slice_begin : INT_MAX;
  for (int offset = num_lanes / 2; offset > 0; offset /= 2) {
    tile.num_blocks += __shfl_xor_sync(~0u, tile.num_blocks, offset);
    tile.slice_end = Max(tile.slice_end, __shfl_xor_sync(~0u, tile.slice_end, offset));
    begin = Min(begin, __shfl_xor_sync(~0u, begin, offset));
    tile.is_marked |= __shfl_xor_sync(~0u, tile.is_marked, offset);
  }
  tile.slice_begin = tile.num_blocks > 0 ? begin : 0;
}

// Each CTA cuts the rows of one list into tiles, then sorts them with a counting sort, one bin per
// thread. For more than one CTA per SM, ptxas would spill registers.
template <int kThreads, Candidates kCandidates>
__global__ void __launch_bounds__(kThreads, /*minBlocksPerMultiprocessor=*/1)
    TileListKernel(const __grid_constant__ ListTasks tasks) {
  const ListTask& task = tasks.tasks[blockIdx.x];
  const CutArgs& args = task.args;
  TileList* const list = task.list;
  Tile* const unsorted = task.unsorted;
  constexpr bool kIsCut = kCandidates != Candidates::kTooMany;
  __shared__ int bins[kThreads], sums[kThreads / 32];
  const int thread = threadIdx.x;
  LetKernelsOverlap();

  CutScratch scratch;
  if constexpr (kCandidates == Candidates::kFew) {
    __shared__ int rows[kThreads];
    __shared__ Segment segments[kThreads];
    scratch = {rows, bins, segments};
  } else {
    // Tiles are stored there when they are sorted.
    static_assert(sizeof(Segment) + 2 * sizeof(int) <= sizeof(Tile), "a candidate takes a tile's");
    auto* segments = reinterpret_cast<Segment*>(list->tiles());
    auto* rows = reinterpret_cast<int*>(segments + args.num_candidates());
    scratch = {rows, rows + args.num_candidates(), segments};
  }
  const Segment* segments = scratch.segments;
  int num_segments = 0;
  const int tiles_per_list = args.tile_rows.CeilDivide(args.num_rows);
  int num_tiles = args.num_lists * tiles_per_list;
  if (kIsCut) {
    num_segments = MakeSegments<kThreads>(args, scratch, sums);
    const Segment& last = segments[num_segments - 1];
    num_tiles = last.first_tile + last.num_tiles;
  }
  if (thread == 0) list->key = task.key;
  __syncthreads();
  bins[thread] = 0;
  __syncthreads();

  const auto cut_tile = [&](int i, int first, int step) {
    Segment segment;
    if (kIsCut) {
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
    return CutTile(args, segment, i, first, step);
  };
  const auto bin_of = [&](const Tile& tile) { return BinOf<kThreads>(tile, task.key.lacks); };
  int num_own_blocks = 0;  // Of the tiles that this thread counts.
  const auto count_tile = [&](const Tile& tile) {
    atomicAdd(&bins[bin_of(tile)], 1);
    num_own_blocks += tile.num_blocks;
  };
  for (int i = thread + kThreads; i < num_tiles; i += kThreads) {
    const Tile tile = cut_tile(i, 0, 1);
    count_tile(tile);
    unsorted[i] = tile;
  }
  // If there are threads to spare, several lanes share the slices of a tile: each slice is a trip
  // to memory.
  int num_lanes = 1;
  while (num_lanes < 32 && 2 * num_lanes * num_tiles <= kThreads) num_lanes *= 2;
  // A thread's first tile stays in registers.
  Tile own{};
  if (thread / num_lanes < num_tiles) {
    own = cut_tile(thread / num_lanes, thread % num_lanes, num_lanes);
  }
  if (num_lanes > 1) {
    __shared__ Tile shared_tiles[kThreads / 2];
    JoinTile(num_lanes, own);
    if (thread % num_lanes == 0) shared_tiles[thread / num_lanes] = own;
    __syncthreads();
    if (thread < num_tiles) own = shared_tiles[thread];
  }
  if (thread < num_tiles) count_tile(own);
  __syncthreads();
  const int count = bins[thread];
  int total;
  const int before = SumBefore<kThreads>(count, sums, &total);
  bins[thread] = before;  // The position of the bin's first tile.
  __shared__ int num_listed;
  if (thread == kThreads - 1) {
    num_listed = before;
    list->num_tiles = num_listed;
    if (num_listed == 0) list->least_blocks = 0;  // Otherwise the last tile's thread writes it.
  }
  for (int i = 0; i < kNumThresholds; ++i) {
    constexpr int kFirstBlocks = kThreads - 2;
    static_assert(ThresholdBlocks(kNumThresholds - 1) <= kFirstBlocks,
                  "the first bin has tiles of any weight");
    // All bins before this one hold tiles with as many blocks or more.
    if (thread == kFirstBlocks - ThresholdBlocks(i) + 1) list->num_above[i] = before;
  }
  int num_blocks;
  SumBefore<kThreads>(num_own_blocks, sums, &num_blocks);
  if (thread == 0) list->num_blocks = num_blocks;
  __syncthreads();
  // Tiles of a bin keep the order in which they were cut, so that the list is always the same:
  // warps take turns.
  for (int i = thread; i - thread < num_tiles; i += kThreads) {
    const bool is_tile = i < num_tiles;
    Tile tile = i < kThreads || !is_tile ? own : unsorted[i];
    const int bin = is_tile ? bin_of(tile) : -1;
    const unsigned same = __match_any_sync(~0u, bin);
    const unsigned before = same & ((1u << thread % 32) - 1);
    const int num_warps = CeilDiv(Min(num_tiles - (i - thread), kThreads), 32);
    for (int warp = 0; warp < num_warps; ++warp) {
      if (thread / 32 == warp && is_tile) tile.index = bins[bin] + __popc(before);
      __syncwarp();
      if (thread / 32 == warp && is_tile && before == 0) bins[bin] += __popc(same);
      __syncthreads();
    }
    if (is_tile) list->tiles()[tile.index] = tile;
    if (is_tile && tile.index == num_listed - 1) list->least_blocks = tile.num_blocks;
  }
}

}  // namespace

Status MakeTileLists(const std::vector<ListRequest>& requests, cudaStream_t stream) {
  constexpr int kFew = 128, kMany = 1024;
  using Kernel = void (*)(ListTasks);
  const auto args_of = [](const ListRequest& request) {
    CutArgs args(request.shape, request.tiling, request.slices);
    args.slice_stride = request.slice_stride;
    return args;
  };
  // The attention kernel waits for its list, and small CTAs are faster when they suffice.
  const bool are_small = std::all_of(requests.begin(), requests.end(), [&](const auto& request) {
    const CutArgs args = args_of(request);
    return args.num_candidates() <= kFew && MaxTiles(request.shape, request.tiling) <= kFew &&
           CeilDiv(args.num_columns, request.tiling.num_columns) < kFew;
  });
  const auto kernel_of = [&](const CutArgs& args) -> Kernel {
    if (are_small) return TileListKernel<kFew, Candidates::kFew>;
    switch (CandidatesOf(args, kMany)) {
      case Candidates::kFew:
        return TileListKernel<kMany, Candidates::kFew>;
      case Candidates::kMany:
        return TileListKernel<kMany, Candidates::kMany>;
      case Candidates::kTooMany:
        return TileListKernel<kMany, Candidates::kTooMany>;
    }
    return nullptr;
  };

  struct Launch {
    Kernel kernel;
    int num_tasks;
    ListTasks tasks;
  };
  std::vector<Launch> launches;
  for (const ListRequest& request : requests) {
    const CutArgs args = args_of(request);
    const Kernel kernel = kernel_of(args);
    auto launch = std::find_if(launches.begin(), launches.end(), [&](const Launch& other) {
      return other.kernel == kernel && other.num_tasks < ListTasks::kMost;
    });
    if (launch == launches.end()) launch = launches.insert(launch, Launch{kernel, 0, {}});
    ListKey key = KeyOf(request.shape, request.tiling);
    key.lacks = request.lacks;
    launch->tasks.tasks[launch->num_tasks++] = {
        args, key, request.list, request.list->tiles() + MaxTiles(request.shape, request.tiling)};
  }
  for (const Launch& launch : launches) {
    JAX_MAGI_CUDA_RETURN_IF_ERROR(LaunchEarly(launch.kernel, launch.num_tasks,
                                              are_small ? kFew : kMany, 0, stream, launch.tasks));
  }
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
