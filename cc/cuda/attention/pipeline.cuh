// What the kernels' producers and consumers share: rings of shared memory, the walk over work and
// over the slices of a tile.

#ifndef JAX_MAGI_CUDA_ATTENTION_PIPELINE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_PIPELINE_CUH_

#include "cc/cuda/attention/backward_workspace.h"
#include "cc/cuda/attention/hopper.cuh"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// A kernel's work: each tile of the list, for each batch element that it serves, for each pack of
// query heads that a block of threads takes at once.
struct WorkParams {
  const Slice* slices;
  int num_slices, num_rows, num_columns;
  const TileList* list;
  WorkCounter* counter;
  // With shared slices, the list's tiles serve this many batch elements; else it names them itself.
  uint32_t num_repeats;
  uint32_t packs_per_section;  // Worked on at once.
  uint32_t work_per_tile;      // num_repeats for each pack; in all, and in a section.
  uint32_t section_work_per_tile;
};

// One block of columns, as the producer hands it on.
struct alignas(16) BlockInfo {
  Slice slice;
  int32_t begin;
  int32_t flags;
};
enum BlockFlag { kMasked = 1, kLast = 2 };

// Position in a ring of stages. The phase flips at each turn of the ring.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ RingPosition Before() const {
    return stage == 0 ? RingPosition{kStages - 1, phase ^ 1} : RingPosition{stage - 1, phase};
  }
};

// One thread arrives for its warp.
__device__ __forceinline__ void ArriveByWarp(uint64_t* barrier, int thread) {
  __syncwarp();
  if (thread % 32 == 0) Arrive(barrier);
}

// One thread arrives for its warp at the barrier of each block of threads of its cluster: at its
// own, the one that reads for it.
template <int kClusterSize, bool kIsOrdered = false>
__device__ __forceinline__ void ArriveByWarpAtAll(uint64_t* barrier, int thread) {
  if constexpr (kClusterSize == 1) {
    ArriveByWarp(barrier, thread);
  } else {
    __syncwarp();
    if (thread % 32 < kClusterSize) {
      const auto arrive = kIsOrdered ? ArriveAt : ArriveUnorderedAt;
      arrive(barrier, ClusterRank() ^ thread % 32);
    }
  }
}

// One thread of the warp reads, and tells the others: it may then arrive for them.
template <typename T>
__device__ __forceinline__ T LoadByWarp(const T& source) {
  static_assert(sizeof(T) % 4 == 0, "a shuffle is of words");
  T result;
  auto* to = reinterpret_cast<int*>(&result);
  const auto* from = reinterpret_cast<const int*>(&source);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) {
    to[i] = __shfl_sync(~0u, threadIdx.x % 32 == 0 ? from[i] : 0, 0);
  }
  return result;
}

// A ring's barriers: `full` completes with so many arrivals of the producer, `empty` of consumers:
// of every thread where all have read words of the stage, else of a thread for each warp.
template <int kStages>
__device__ __forceinline__ void InitRing(uint64_t (&full)[kStages], uint64_t (&empty)[kStages],
                                         int full_arrivals, int empty_arrivals) {
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    InitBarrier(&full[i], full_arrivals);
    InitBarrier(&empty[i], empty_arrivals);
  }
}

// Producers have few registers: what they know of the tile stays in shared memory.
struct WorkItem {
  Tile tile;
  uint32_t pack, number;
  int32_t slice;
  Range columns;
  int32_t first_head, num_heads;  // That are worked on in turn.
  int32_t head;                   // That is being worked on.
  int32_t remaining;              // Blocks, of all heads.
  uint32_t num_done;              // Tiles before this one.
  int32_t skipped;                // Blocks of the tile that come before this part's.
  int32_t part;                   // The tile's number of parts << 16 | the part's number; 0: whole.
};

// Work whose numbers are its own, as nothing of it is cut: see KeyParts.
struct WholeWork {
  __device__ __forceinline__ bool Has(uint32_t number, const WorkParams& params, int) const {
    return number < params.list->num_tiles * params.work_per_tile;
  }
  __device__ __forceinline__ uint32_t WorkOf(uint32_t number) const { return number; }
  __device__ __forceinline__ void Cut(uint32_t, WorkItem&) const {}
};

// A division takes 130 cycles: numbers are mostly below the divisor here, or it is 1.
__device__ __forceinline__ uint32_t Divide(uint32_t x, uint32_t divisor) {
  if (x < divisor) return 0;
  return divisor == 1 ? x : x / divisor;
}

// Sets the item's tile to the one at `index` of the list. For one warp.
__device__ __forceinline__ void CopyTile(const WorkParams& params, uint32_t index, int lane,
                                         WorkItem& item) {
  const Tile* tile = params.list->tiles() + index;
  int part = lane;
  asm volatile("" : "+r"(part));  // Else addresses made of it take registers all the time.
  if (part < static_cast<int>(sizeof(Tile) / sizeof(int4))) {  // Both at once.
    reinterpret_cast<int4*>(&item.tile)[part] = reinterpret_cast<const int4*>(tile)[part];
  }
  __syncwarp();
}

// Sets the item to work `number`. For one warp.
template <typename Parts>
__device__ __forceinline__ void FindWork(const WorkParams& params, const Parts& parts,
                                         uint32_t number, int lane, WorkItem& item) {
  // Sections one after the other; in each, packs of heads side by side.
  const uint32_t per_section = params.list->num_tiles * params.section_work_per_tile;
  const uint32_t work = parts.WorkOf(number), section = Divide(work, per_section);
  const uint32_t in_section = work - section * per_section;
  const uint32_t repeat = in_section / params.packs_per_section;
  if (lane == 0) item.pack = (section - repeat) * params.packs_per_section + in_section;
  const uint32_t index = Divide(repeat, params.num_repeats);
  CopyTile(params, index, lane, item);
  if (lane == 0) {
    item.tile.batch += repeat - index * params.num_repeats;
    parts.Cut(number, item);
  }
  __syncwarp();
}

// Calls load() for the work of this block of threads, which it finds in `item`: number `first`,
// then what next() sets. has(number) says whether there is such work, and find(number) sets the
// item to it. For one warp, which has waited for the previous kernel.
template <typename Has, typename Find, typename Load, typename Next>
__device__ __forceinline__ void ForEachWork(int lane, WorkItem& item, uint32_t first, Has has,
                                            Find find, Load load, Next next) {
  if (lane == 0) {
    item.number = first;
    item.num_done = 0;
  }
  __syncwarp();
  while (has(item.number)) {
    find(item.number);
    load();
    // Consumers are a few blocks behind: there is time for the trip to memory.
    next();
    if (lane == 0) ++item.num_done;
    __syncwarp();
  }
  LetNextKernelStart();
}

// The same for work of which nothing is cut.
template <typename Load, typename Next>
__device__ __forceinline__ void ForEachWork(const WorkParams& params, int lane, WorkItem& item,
                                            uint32_t first, Load load, Next next) {
  constexpr WholeWork parts;
  WaitForPreviousKernel();  // It makes what is loaded first, and resets the counter.
  ForEachWork(
      lane, item, first, [&](uint32_t number) { return parts.Has(number, params, lane); },
      [&](uint32_t number) { FindWork(params, parts, number, lane, item); }, load, next);
}

// The next work of a cluster of two, from its first block of threads to the second. Both do the
// same in the same order, as they wait for each other's part of what they load.
struct ClusterWork {
  uint32_t next;
  uint64_t full, empty;  // The second one's: its number is there. The first one's: it was read.

  __device__ __forceinline__ void Init() {
    InitBarrier(&full, 1);
    InitBarrier(&empty, 1);
  }

  // Returns the number of the `count`th work after the first. For one warp of each.
  __device__ __forceinline__ uint32_t Next(const WorkParams& params, int lane, uint32_t count) {
    uint32_t number = 0;
    // Lanes wait together, and there is one way out: ptxas schedules the consumers' loop badly if
    // not.
    if (ClusterRank() == 0) {
      Wait(&empty, count % 2 ^ 1);
      __syncwarp();  // What follows lets the barrier go on.
      if (lane == 0) {
        number = gridDim.x / 2 + atomicAdd(&params.counter->next_work, 1);
        StoreAt(&next, &full, 1, number);
      }
    } else {
      if (lane == 0) ArriveExpectBytes(&full, sizeof(next));
      Wait(&full, count % 2);
      if (lane == 0) {
        number = *const_cast<const volatile uint32_t*>(&next);
        ArriveUnorderedAt(&empty, 0);  // It is written again when the next one is asked for.
      }
    }
    return __shfl_sync(~0u, number, 0);
  }
};

// Rows of a box in which LoadPanels loads a block.
template <int kClusterSize, int kDim, int kRows>
constexpr int kPanelRows = kDim == 64 ? kRows / kClusterSize : kRows;

// Loads a block of rows from `row` on, which stream past the tile, in panels of 64 dims. In a
// cluster of two, each block of threads loads half for both: a panel of two, or half of the rows of
// the only one. For one lane; head() is asked for each box, as registers are scarce.
template <int kClusterSize, int kDim, int kRows, typename Element, typename Head>
__device__ __forceinline__ void LoadPanels(const CUtensorMap& map, uint64_t* full, Element* dst,
                                           Head head, int row, const WorkItem& item) {
  if constexpr (kClusterSize == 1) {
#pragma unroll
    for (int d = 0; d < kDim; d += 64) {
      LoadBox(&map, full, dst + d * kRows, d, head(), row, item.tile.batch);
    }
  } else {
    const int part = static_cast<int>(ClusterRank());
    const int d = kDim == 64 ? 0 : 64 * part;
    const int skipped = kDim == 64 ? part * kPanelRows<kClusterSize, kDim, kRows> : 0;
    LoadBoxForRanks(&map, full, dst + d * kRows + skipped * 64, (1 << kClusterSize) - 1, d, head(),
                    row + skipped, item.tile.batch);
  }
}

// Until no other block of threads needs this one's shared memory. In each role for itself: behind
// both, it makes ptxas schedule the consumers' loop badly.
template <typename Config>
__device__ __forceinline__ void WaitForClusterToEnd() {
  if constexpr (Config::kClusterSize > 1) ClusterSync();
}

// Until barriers are there: in a cluster, others arrive at them, too.
template <typename Config>
__device__ __forceinline__ void WaitForBarriers() {
  if constexpr (Config::kClusterSize == 1) {
    __syncthreads();
  } else {
    ClusterSync();
  }
}

// Slice `i` of the tile's list.
template <bool kByKeys>
__device__ __forceinline__ Slice LoadTileSlice(const WorkParams& params, const Tile& tile, int i) {
  const Slice* slices =
      params.slices + (params.num_repeats > 1 ? 0 : int64_t{tile.batch} * params.num_slices);
  return LoadSlice(slices, i, params.num_rows, params.num_columns, kByKeys);
}

// Whether every one of these rows sees every column of a block.
__device__ __forceinline__ bool IsClean(const Slice& slice, Range rows, int begin,
                                        int num_columns) {
  if (rows.begin < slice.q_begin || rows.end > slice.q_end) return false;
  const Range clean = CleanKeys(slice, rows);
  return clean.begin <= begin && begin + num_columns <= clean.end;
}

// Calls walk(slice, columns) for each slice that touches the tile, by its index, with the columns
// that some row sees (TouchedColumns). Lanes look at 32 slices at once.
template <bool kByKeys, bool kAlignsEnd, typename Walk>
__device__ __forceinline__ void ForEachSlice(const WorkParams& params, const Tile& tile, int lane,
                                             Walk walk) {
  for (int first = tile.slice_begin; first < tile.slice_end; first += 32) {
    Range touched{0, 0};
    if (first + lane < tile.slice_end) {
      touched =
          TouchedColumns(LoadTileSlice<kByKeys>(params, tile, first + lane), tile, kAlignsEnd);
    }
    for (unsigned hits = __ballot_sync(~0u, touched.begin < touched.end); hits; hits &= hits - 1) {
      const int owner = __ffs(hits) - 1;
      walk(first + owner,
           Range{__shfl_sync(~0u, touched.begin, owner), __shfl_sync(~0u, touched.end, owner)});
    }
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_PIPELINE_CUH_
