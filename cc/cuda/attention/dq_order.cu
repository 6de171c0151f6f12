#include "cc/cuda/attention/dq_order.h"
#include "cc/cuda/attention/early_launch.h"
#include "cc/cuda/attention/hopper.cuh"
#include "cc/cuda/attention/tile_cuts.h"

namespace jax_magi::cuda {
namespace {

constexpr int kThreads = 128;

// Additions to some of `unit`, of blocks that are laid from right to left over `queries`.
__device__ int NumVisits(const DqSteps& steps, Range queries, Range unit) {
  const int width = steps.block_queries;
  const int num_blocks = CeilDiv(queries.end - queries.begin, width);
  int num_visits = 0;
  const int last = Min((queries.end - unit.begin) / width + 1, num_blocks - 1);
  for (int i = Max(queries.end - unit.end, 0) / width; i <= last; ++i) {
    const int begin = Max(queries.end - (i + 1) * width, 0);  // As the producer has it.
    for (int step = begin; step < begin + width; step += steps.step_queries) {
      num_visits += step < unit.end && step + steps.step_queries > unit.begin;
    }
  }
  return num_visits;
}

// A thread has one unit of one slice list.
__global__ void __launch_bounds__(kThreads)
    DqOrderKernel(CutArgs args, const TileList* list, DqSteps steps, DqOrder order, int num_rows) {
  WaitForPreviousKernel();
  LetNextKernelStart();
  const int thread = blockIdx.x * kThreads + threadIdx.x;
  const int batch = thread / order.num_units, unit = thread % order.num_units;
  if (batch >= args.num_lists) return;
  const Range queries{unit << order.log2_queries, Min((unit + 1) << order.log2_queries, num_rows)};
  int num_visits = 0;
  for (int i = 0; i < list->num_tiles; ++i) {
    const Tile tile = list->tiles()[i];
    if (tile.batch != batch) continue;
    int num_more = 0;
    bool is_visited = false;
    for (int s = tile.slice_begin; s < tile.slice_end; ++s) {
      const Range columns = TouchedColumns(args, tile, s);
      if (columns.begin >= columns.end) continue;
      num_more += NumVisits(steps, columns, queries);
      is_visited |= columns.begin < queries.end && columns.end > queries.begin;
    }
    order.before[int64_t{i} * order.num_units + unit] = is_visited ? num_visits : kNotVisited;
    if (is_visited) num_visits += num_more;
  }
}

}  // namespace

Status MakeDqOrder(const AttentionShape& shape, const Tiling& tiling, const Slice* slices,
                   const TileList* list, const DqSteps& steps, const DqOrder& order,
                   cudaStream_t stream) {
  if (order.num_units == 0) return {};  // There are no queries.
  const CutArgs args(shape, tiling, slices);
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      LaunchEarly(DqOrderKernel, CeilDiv(args.num_lists * order.num_units, kThreads), kThreads, 0,
                  stream, args, list, steps, order, DqSumRows(shape.q_len)));
  return {};
}

}  // namespace jax_magi::cuda
