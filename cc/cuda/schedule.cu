#include "cc/cuda/schedule.h"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kNumBins = 1024;  // Tiles are sorted by number of blocks; longer ones share a bin.
static_assert(kThreads == kNumBins, "a thread a bin");

// A shorter segment between two cuts is left together with its neighbour: many tiny documents
// would each pay for a whole tile.
constexpr int kShortestSegment = 64;

struct ScheduleArgs {
  int batch, q_len, k_len, num_heads, num_slices;
  bool shared_slices;
  int block_m, block_n;
  const Slice* slices;
};

// Rows between two cuts, in one element of the batch (or in all, if they share their slices).
struct Segment {
  int batch, begin, end;
  int first_tile;
};

__device__ int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Row of candidate `index` for a cut: 0 for the first, then both ends of each slice. 0 also stands
// for no cut.
__device__ int CutRow(const ScheduleArgs& args, int batch, int index) {
  if (index == 0) return 0;
  const Slice slice =
      ClampSlice(args.slices[batch * args.num_slices + (index - 1) / 2], args.q_len, args.k_len);
  if (slice.q_begin >= slice.q_end || slice.k_begin >= slice.k_end) return 0;
  const int row = (index - 1) % 2 ? slice.q_end : slice.q_begin;
  return row < args.q_len ? row : 0;
}

// Makes the sorted list of segments: a thread a candidate, so there are at most kThreads of them.
// Returns their number. `rows` and `kept` are scratch.
__device__ int MakeSegments(const ScheduleArgs& args, int num_batches, Segment* segments, int* rows,
                            int* kept) {
  const int per_batch = 2 * args.num_slices + 1;
  const int num_candidates = num_batches * per_batch;
  const int thread = threadIdx.x;
  const int batch = thread / per_batch, index = thread % per_batch;
  const int first = batch * per_batch;  // Of this batch element's candidates.
  const bool is_candidate = thread < num_candidates;
  if (is_candidate) rows[thread] = CutRow(args, batch, index);
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

  int rank = 0, next = args.q_len, first_tile = 0;
  if (is_kept) {
    for (int i = 0; i < num_candidates; ++i) {
      if (!kept[i]) continue;
      const bool is_same = i >= first && i < first + per_batch;
      if (i < first || (is_same && rows[i] < row)) ++rank;
      if (is_same && rows[i] > row) next = Min(next, rows[i]);
    }
    segments[rank] = {batch, row, next, 0};
  }
  __syncthreads();
  if (is_kept) {
    for (int i = 0; i < rank; ++i) {
      first_tile += CeilDiv(segments[i].end - segments[i].begin, args.block_m);
    }
  }
  __syncthreads();
  if (is_kept) segments[rank].first_tile = first_tile;
  __syncthreads();
  return num_segments;
}

__device__ void CountBlocks(const ScheduleArgs& args, QueryTile& tile) {
  const Slice* slices = args.slices + (args.shared_slices ? 0 : tile.batch * args.num_slices);
  for (int i = 0; i < args.num_slices; ++i) {
    const Slice slice = ClampSlice(slices[i], args.q_len, args.k_len);
    const Range rows =
        Intersect({tile.q_begin, tile.q_begin + tile.num_rows}, {slice.q_begin, slice.q_end});
    if (rows.begin >= rows.end) continue;
    const Range keys = TouchedKeys(slice, rows);
    if (keys.begin >= keys.end) continue;
    if (tile.num_blocks == 0) tile.slice_begin = i;
    tile.slice_end = i + 1;
    tile.num_blocks += CeilDiv(keys.end - keys.begin, args.block_n);
  }
}

// Bin 0 holds the heaviest.
__device__ int BinOf(const QueryTile& tile) {
  return kNumBins - 1 - Min(tile.num_blocks, kNumBins - 1);
}

// One block of threads: cuts rows into tiles, then sorts them by counting.
__global__ void __launch_bounds__(kThreads)
    ScheduleKernel(ScheduleArgs args, ScheduleHeader* header, QueryTile* unsorted,
                   float* max_logits) {
  __shared__ int bins[kNumBins], rows[kThreads];
  __shared__ Segment segments[kThreads];
  QueryTile* sorted = reinterpret_cast<QueryTile*>(header + 1);
  const int thread = threadIdx.x;
  for (int i = thread; i < args.batch * args.num_heads; i += kThreads) max_logits[i] = -INFINITY;

  // Too many candidates, and every batch element is one segment.
  const int num_batches = args.shared_slices ? 1 : args.batch;
  const bool is_cut = int64_t{num_batches} * (2 * args.num_slices + 1) <= kThreads;
  int num_segments = 0, tiles_per_batch = CeilDiv(args.q_len, args.block_m);
  if (is_cut) {
    num_segments = MakeSegments(args, num_batches, segments, rows, bins);
    const Segment& last = segments[num_segments - 1];
    tiles_per_batch = last.first_tile + CeilDiv(last.end - last.begin, args.block_m);
  }
  // With segments of several batch elements in the list, it is walked once; else once for each.
  const int num_walks = is_cut && !args.shared_slices ? 1 : args.batch;
  const int num_tiles = num_walks * tiles_per_batch;
  if (thread == 0) {
    header->next_work = 0;
    header->num_tiles = num_tiles;
  }
  __syncthreads();
  bins[thread] = 0;
  __syncthreads();

  for (int i = thread; i < num_tiles; i += kThreads) {
    const int index = i % tiles_per_batch;
    Segment segment{0, 0, args.q_len, 0};
    if (is_cut) {
      int low = 0;  // The last segment that begins at or before this tile.
      for (int high = num_segments; high - low > 1;) {
        const int middle = (low + high) / 2;
        (segments[middle].first_tile <= index ? low : high) = middle;
      }
      segment = segments[low];
    }
    QueryTile tile{};
    tile.batch = segment.batch + i / tiles_per_batch;
    tile.q_begin = segment.begin + (index - segment.first_tile) * args.block_m;
    tile.num_rows = Min(args.block_m, segment.end - tile.q_begin);
    CountBlocks(args, tile);
    unsorted[i] = tile;
    atomicAdd(&bins[BinOf(tile)], 1);
  }
  __syncthreads();

  // Sums over bins, to where each begins.
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
    sorted[atomicAdd(&bins[BinOf(tile)], 1)] = tile;
  }
}

}  // namespace

cudaError_t MakeSchedule(const AttentionShape& shape, int block_m, int block_n, const Slice* slices,
                         void* workspace, float* max_logits, cudaStream_t stream) {
  const ScheduleArgs args{static_cast<int>(shape.batch),
                          static_cast<int>(shape.q_len),
                          static_cast<int>(shape.k_len),
                          static_cast<int>(shape.num_q_heads),
                          static_cast<int>(shape.num_slices),
                          shape.shared_slices,
                          block_m,
                          block_n,
                          slices};
  auto* header = static_cast<ScheduleHeader*>(workspace);
  QueryTile* unsorted = reinterpret_cast<QueryTile*>(header + 1) + MaxTiles(shape, block_m);
  ScheduleKernel<<<1, kThreads, 0, stream>>>(args, header, unsorted, max_logits);
  return cudaGetLastError();
}

}  // namespace jax_magi::cuda
