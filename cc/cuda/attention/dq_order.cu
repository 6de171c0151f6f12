#include "cc/cuda/attention/dq_order.h"
#include "cc/cuda/attention/early_launch.cuh"
#include "cc/cuda/attention/instructions.cuh"
#include "cc/cuda/attention/tile_cuts.h"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMinBlocks = 8;  // CTAs per SM. Without this bound, registers spill.

// The number of additions to any query of `unit`, if blocks are laid from right to left over
// `queries`.
__device__ __forceinline__ int NumVisits(const DqSteps& steps, Range queries, Range unit) {
  const int width = steps.block_queries;
  const int num_blocks = CeilDiv(queries.end - queries.begin, width);
  int num_visits = 0;
  const int last = Min((queries.end - unit.begin) / width + 1, num_blocks - 1);
  for (int i = Max(queries.end - unit.end, 0) / width; i <= last; ++i) {
    const int begin = Max(queries.end - (i + 1) * width, 0);  // As in the producer.
    for (int step = begin; step < begin + width; step += steps.step_queries) {
      num_visits += step < unit.end && step + steps.step_queries > unit.begin;
    }
  }
  return num_visits;
}

// The number of visits of `unit` by a tile.
__device__ __forceinline__ int NumVisits(const CutArgs& args, const DqSteps& steps,
                                         const Tile& tile, Range unit) {
  int num_visits = 0;
  for (int s = tile.slice_begin; s < tile.slice_end; ++s) {
    const Range columns = TouchedColumns(args, tile, s);
    if (columns.begin < columns.end) num_visits += NumVisits(steps, columns, unit);
  }
  return num_visits;
}

// The queries of the unit that see the tile, from the first to the last.
__device__ __forceinline__ Range QueriesThatSee(const CutArgs& args, const Tile& tile, Range unit) {
  Range queries{unit.end, unit.begin};
  for (int s = tile.slice_begin; s < tile.slice_end; ++s) {
    const Range seen = Intersect(SeenColumns(args, tile, s), unit);
    if (seen.begin >= seen.end) continue;
    queries = {Min(queries.begin, seen.begin), Max(queries.end, seen.end)};
  }
  return queries;
}

// Finds a query at which a unit can be split: some tiles' queries end before it, others begin at
// it, and no tile's queries lie on both sides.
class UnitParts {
 public:
  __device__ explicit UnitParts(Range unit) : unit_(unit) {}

  // Adds the queries that see a tile.
  __device__ void Add(Range queries) {
    if (unit_.end - unit_.begin > 32) return;  // Large units are not split.
    const int first = queries.begin - unit_.begin, last = queries.end - 1 - unit_.begin;
    begins_ |= 1u << first;
    // Sets the bits after `first`, up to and including `last`.
    crossed_ |= (~0u >> (31 - last)) & ~(~0u >> (31 - first));
  }

  // The beginning of the second part, given what all lanes of the warp added; the unit's end if it
  // is not split.
  __device__ int Split() const {
    uint32_t free = __reduce_or_sync(~0u, begins_) & ~__reduce_or_sync(~0u, crossed_);
    free &= free - 1;  // The first candidate has no tile before it.
    return free == 0 ? unit_.end : unit_.begin + __ffs(static_cast<int>(free)) - 1;
  }

 private:
  Range unit_;
  uint32_t begins_ = 0;   // Bit i: the queries of some tile begin at query i of the unit.
  uint32_t crossed_ = 0;  // Bit i: the queries of some tile include both i - 1 and i.
};

// Counts visits in the order of tiles, 32 tiles at a time, one per lane.
class VisitCounter {
 public:
  // Adds the visits of this lane's tile, and returns the number before them.
  __device__ int Add(int num_visits) {
    const int sum = SumUpToLane(num_visits);
    const int before = num_ + sum - num_visits;
    num_ += __shfl_sync(~0u, sum, 31);
    return before;
  }

 private:
  int num_ = 0;
};

// Each warp handles one unit of one slice list, and examines 32 tiles at a time.
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    DqOrderKernel(CutArgs args, const TileList* list, DqSteps steps, DqOrder order, int num_rows) {
  WaitForPreviousKernel();
  LetNextKernelStart();
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int batch = warp / order.num_units, unit = warp % order.num_units;
  if (batch >= args.num_lists) return;
  const Range queries{unit << order.log2_queries, Min((unit + 1) << order.log2_queries, num_rows)};
  const Tile* tiles = list->tiles();
  const int num_tiles = list->num_tiles;
  const auto is_own = [&](int i) { return i < num_tiles && tiles[i].batch == batch; };

  UnitParts parts(queries);
  for (int i = lane; i < num_tiles; i += 32) {
    if (!is_own(i)) continue;
    const Range seeing = QueriesThatSee(args, tiles[i], queries);
    if (seeing.begin < seeing.end) parts.Add(seeing);
  }
  const int split = parts.Split();

  VisitCounter first, second;  // The unit's two parts.
  for (int i = lane; i - lane < num_tiles; i += 32) {
    Range seeing{0, 0};
    if (is_own(i)) seeing = QueriesThatSee(args, tiles[i], queries);
    const bool is_visited = seeing.begin < seeing.end, is_second = seeing.begin >= split;
    const int num_visits = is_visited ? NumVisits(args, steps, tiles[i], queries) : 0;
    const int before_first = first.Add(is_second ? 0 : num_visits);
    const int before_second = second.Add(is_second ? num_visits : 0);
    if (!is_own(i)) continue;
    const DqTurn turn{is_second, is_second ? before_second : before_first};
    order.turns[int64_t{i} * order.num_units + unit] = is_visited ? turn.Pack() : kNotVisited;
  }
}

}  // namespace

Status MakeDqOrder(const AttentionShape& shape, const Tiling& tiling, const Slice* slices,
                   const TileList* list, const DqSteps& steps, const DqOrder& order,
                   cudaStream_t stream) {
  if (order.num_units == 0) return {};  // There are no queries.
  const CutArgs args(shape, tiling, slices);
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      LaunchEarly(DqOrderKernel, CeilDiv(args.num_lists * order.num_units, kThreads / 32), kThreads,
                  0, stream, args, list, steps, order, DqSumRows(shape.q_len)));
  return {};
}

}  // namespace jax_magi::cuda
