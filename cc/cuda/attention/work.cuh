// The walk over a kernel's work, and over the slices of a tile.

#ifndef JAX_MAGI_CUDA_ATTENTION_WORK_CUH_
#define JAX_MAGI_CUDA_ATTENTION_WORK_CUH_

#include "cc/cuda/attention/early_launch.cuh"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// A kernel's work: each tile of the list, for each batch element that it serves, for each pack of
// query heads that a block of threads takes at once.
struct WorkParams {
  const Slice* slices;
  int num_slices, num_rows, num_columns, num_lists;
  const TileList* list;
  WorkCounter* counter;
  // With shared slices, the list's tiles serve this many batch elements; else it names them itself.
  uint32_t num_repeats;
  uint32_t packs_per_section;  // Worked on at once.
  uint32_t work_per_tile;      // num_repeats for each pack; in all, and in a section.
  uint32_t section_work_per_tile;
};

// Says what work there is: each tile for `num_packs` packs of heads.
inline WorkParams MakeWork(const AttentionShape& shape, const Tiling& tiling, const Slice* slices,
                           const TileList* list, WorkCounter* counter, int num_packs,
                           int packs_per_section) {
  WorkParams work;
  work.slices = slices;
  work.num_slices = static_cast<int>(shape.num_slices);
  work.num_rows = NumRows(shape, tiling);
  work.num_columns = NumColumns(shape, tiling);
  work.num_lists = NumLists(shape);
  work.list = list;
  work.counter = counter;
  work.num_repeats = shape.shared_slices ? static_cast<uint32_t>(shape.batch) : 1;
  work.packs_per_section = packs_per_section;
  work.work_per_tile = work.num_repeats * num_packs;
  work.section_work_per_tile = work.num_repeats * packs_per_section;
  return work;
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

// Sets the item's tile to the one at `index` of the list. For one warp, whose first lane alone may
// use it before the warp is synchronized again.
__device__ __forceinline__ void CopyTile(const WorkParams& params, uint32_t index, int lane,
                                         WorkItem& item) {
  const Tile* tile = params.list->tiles() + index;
  int part = lane;
  asm volatile("" : "+r"(part));  // Else addresses made of it take registers all the time.
  if (part < static_cast<int>(sizeof(Tile) / sizeof(int4))) {  // Both at once.
    reinterpret_cast<int4*>(&item.tile)[part] = reinterpret_cast<const int4*>(tile)[part];
  }
  __syncwarp();
  if (lane == 0) ClampTile(params.num_lists, params.num_rows, params.num_slices, item.tile);
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

#endif  // JAX_MAGI_CUDA_ATTENTION_WORK_CUH_
