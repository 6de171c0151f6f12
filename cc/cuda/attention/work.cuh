// Iteration over a kernel's work items, and over the slices of a tile.

#ifndef JAX_MAGI_CUDA_ATTENTION_WORK_CUH_
#define JAX_MAGI_CUDA_ATTENTION_WORK_CUH_

#include <algorithm>

#include "cc/cuda/attention/early_launch.cuh"
#include "cc/cuda/attention/tile_list.h"

namespace jax_magi::cuda {

// A kernel's work: each tile of the list, for each batch element that it applies to, for each pack
// of query heads that a CTA processes at once.
struct WorkParams {
  const Slice* slices;
  int num_slices, num_rows, num_columns, num_lists;
  const TileList* list;
  WorkCounter* counter;
  // With shared slices, each tile applies to this many batch elements; otherwise a tile names its
  // own.
  uint32_t num_repeats;
  uint32_t packs_per_section;  // Processed at the same time.
  uint32_t work_per_tile;      // num_repeats * packs: in total, and per section.
  uint32_t section_work_per_tile;
};

// The work of a call: each tile for `num_packs` packs of heads.
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

// The number of packs of query heads in progress at a time: whole groups, and the same number each
// time. Keys and values of their heads should fit in `num_l2_bytes`.
inline int PacksPerSection(const AttentionShape& shape, int packs_per_kv_head,
                           int64_t num_l2_bytes) {
  const int64_t num_bytes = 2 * shape.batch * shape.k_len * (shape.head_dim + shape.value_dim) + 1;
  int64_t kv_heads = std::clamp<int64_t>(num_l2_bytes / num_bytes, 1, shape.num_kv_heads);
  while (shape.num_kv_heads % kv_heads) --kv_heads;
  return static_cast<int>(kv_heads) * packs_per_kv_head;
}

// Lane 0 reads and broadcasts to the warp, so that it may then arrive at a barrier for all lanes.
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

// The producer's state for the current tile, in shared memory because producers have few registers.
struct WorkItem {
  Tile tile;
  uint32_t pack, number;
  int32_t slice;
  Range columns;
  int32_t first_head, num_heads;  // Heads to process one after the other.
  int32_t head;                   // The current head.
  int32_t remaining;              // Blocks left to process, over all heads.
  uint32_t num_done;              // Tiles processed before this one.
  int32_t skipped;                // Blocks of the tile that precede this part.
  int32_t part;  // Number of parts of the tile << 16 | index of this part; 0: not cut.
};

// A section of a call: the packs of heads that it has, and its work for each tile.
struct Section {
  uint32_t num_packs, work_per_tile;
};

// Work of which nothing is cut, so numbers need no translation: compare KeyParts.
struct WholeWork {
  __device__ __forceinline__ bool Has(uint32_t number, const WorkParams& params, int) const {
    return number < params.list->num_tiles * params.work_per_tile;
  }
  __device__ __forceinline__ uint32_t WorkOf(uint32_t number) const { return number; }
  __device__ __forceinline__ Section SectionOf(const WorkParams& params) const {
    return {params.packs_per_section, params.section_work_per_tile};
  }
  __device__ __forceinline__ void Cut(uint32_t, WorkItem&) const {}
};

// A division takes 130 cycles; here, x is mostly below the divisor, or the divisor is 1.
__device__ __forceinline__ uint32_t Divide(uint32_t x, uint32_t divisor) {
  if (x < divisor) return 0;
  return divisor == 1 ? x : x / divisor;
}

// Sets the item's tile to the one at `index` of the list. Called by one warp; only its first lane
// may use the tile before the warp is synchronized again.
__device__ __forceinline__ void CopyTile(const WorkParams& params, uint32_t index, int lane,
                                         WorkItem& item) {
  const Tile* tile = params.list->tiles() + index;
  int part = lane;
  asm volatile("" : "+r"(part));  // Otherwise addresses derived from it stay in registers.
  if (part < static_cast<int>(sizeof(Tile) / sizeof(int4))) {  // Two lanes copy both vectors.
    reinterpret_cast<int4*>(&item.tile)[part] = reinterpret_cast<const int4*>(tile)[part];
  }
  __syncwarp();
  if (lane == 0) ClampTile(params.num_lists, params.num_rows, params.num_slices, item.tile);
}

// Sets the item to work `number`. Called by one warp.
template <typename Parts>
__device__ __forceinline__ void FindWork(const WorkParams& params, const Parts& parts,
                                         uint32_t number, int lane, WorkItem& item) {
  // Sections follow one another; within a section, packs of heads vary fastest.
  const Section each = parts.SectionOf(params);
  const uint32_t per_section = params.list->num_tiles * each.work_per_tile;
  const uint32_t work = parts.WorkOf(number), section = Divide(work, per_section);
  const uint32_t in_section = work - section * per_section;
  const uint32_t repeat = in_section / each.num_packs;
  if (lane == 0) item.pack = (section - repeat) * each.num_packs + in_section;
  const uint32_t index = Divide(repeat, params.num_repeats);
  CopyTile(params, index, lane, item);
  if (lane == 0) {
    item.tile.batch += repeat - index * params.num_repeats;
    parts.Cut(number, item);
  }
  __syncwarp();
}

// Calls load() for each work item of this CTA, described in `item`: first number `first`, then the
// numbers that next() stores in it. has(number) tells whether that work exists, and find(number)
// sets the item to it. Called by one warp, after it has waited for the previous kernel.
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
    // Consumers lag a few blocks behind, which hides the latency of next().
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
  // Kernels before this one write some of what is loaded, and reset the counter.
  WaitForPreviousKernel();
  ForEachWork(
      lane, item, first, [&](uint32_t number) { return parts.Has(number, params, lane); },
      [&](uint32_t number) { FindWork(params, parts, number, lane, item); }, load, next);
}

// Slice `i` of the slice list that the tile belongs to.
template <bool kByKeys>
__device__ __forceinline__ Slice LoadTileSlice(const WorkParams& params, const Tile& tile, int i) {
  const Slice* slices =
      params.slices + (params.num_repeats > 1 ? 0 : int64_t{tile.batch} * params.num_slices);
  return LoadSlice(slices, i, params.num_rows, params.num_columns, kByKeys);
}

// The description of one column block.
struct alignas(16) BlockInfo {
  Slice slice;
  int32_t begin;
  int32_t flags;
};
enum BlockFlag { kMasked = 1, kLast = 2 };

// Whether each of these rows sees every column of a block.
__device__ __forceinline__ bool IsClean(const Slice& slice, Range rows, int begin,
                                        int num_columns) {
  if (rows.begin < slice.q_begin || rows.end > slice.q_end) return false;
  const Range clean = CleanKeys(slice, rows);
  return clean.begin <= begin && begin + num_columns <= clean.end;
}

// Calls walk(i, columns) for each slice i that touches the tile, with the columns that some row
// sees (TouchedColumns). Each lane examines one of 32 slices at a time.
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
