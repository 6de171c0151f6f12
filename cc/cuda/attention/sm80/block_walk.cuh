// The sequence of query blocks that a key tile meets, for the backward kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BLOCK_WALK_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BLOCK_WALK_CUH_

#include "cc/cuda/attention/work.cuh"

namespace jax_magi::cuda::sm80 {

// One query block of a key tile and a query head.
struct alignas(16) BlockInfo {
  Slice slice;     // Rows are keys. Restricted to the tile's keys, and to queries before the end.
  int32_t begin;   // The first query.
  int32_t head;    // Negative: there is no such block.
  bool is_masked;  // Whether any pair of the block may be hidden.
};

// Which heads a tile is for, and how blocks are ordered.
struct WalkParams {
  int group, heads_per_pack;  // Query heads per kv head, and per pack: see WorkParams.
  int packs_per_kv_head;
  int columns_per_head;  // Queries that are processed for all heads before the next queries.
};

// The state of a walk, in shared memory: one warp advances it, and all warps read its tile.
//
// Blocks go from right to left, some of them for all heads, then the next: under a causal mask,
// tiles that run concurrently then read the same queries at about the same time. If a tile meets
// several slices, it processes all of them for one head after another.
template <int kKeys, int kQueries>
struct BlockWalk : WorkItem {
  bool has_tile;
  bool is_done;       // All blocks have been handed out.
  Slice current;      // The slice `slice`, restricted to the tile's keys.
  int32_t run_begin;  // Of the queries that are processed for all heads before the next.
  int32_t end;        // Of the next block.
  int32_t head_end;   // Of all heads.

  __device__ __forceinline__ int KvHead(const WalkParams& params) const {
    return static_cast<int>(pack) / params.packs_per_kv_head;
  }
  __device__ __forceinline__ int PackInHead(const WalkParams& params) const {
    return static_cast<int>(pack) % params.packs_per_kv_head;
  }

  // Begins with the tile of work `number`, if there is such work. Called by one warp, as are all
  // functions below; next() fetches the number of the work after it.
  template <typename Next>
  __device__ __forceinline__ void Start(const WorkParams& work, const WalkParams& params, int lane,
                                        Next next) {
    constexpr WholeWork parts;
    const bool has_work = parts.Has(number, work, lane);
    __syncwarp();
    if (lane == 0) has_tile = has_work;
    if (!has_work) return;
    FindWork(work, parts, number, lane, *this);
    if (lane == 0) {
      first_head = KvHead(params) * params.group + PackInHead(params) * params.heads_per_pack;
      head = first_head;
      head_end = first_head + params.heads_per_pack;
      const bool is_simple = tile.slice_end - tile.slice_begin <= 1;
      num_heads = is_simple ? params.heads_per_pack : 1;
      is_done = false;
    }
    __syncwarp();
    FindSlice(work, params, tile.slice_begin, lane, next);
  }

  // Sets `info` to the next block.
  template <typename Next>
  __device__ __forceinline__ void Advance(const WorkParams& work, const WalkParams& params,
                                          int lane, BlockInfo& info, Next next) {
    bool is_slice_done = false;
    if (lane == 0) {
      if (is_done) {
        info.head = -1;
      } else {
        // The first block may extend past `end`, as no block begins before 0.
        const int begin = Max(end - kQueries, 0);
        Slice shown = current;
        const bool is_clean = tile.num_rows == kKeys && begin + kQueries == end &&
                              IsClean(shown, tile.rows(), begin, kQueries);
        shown.k_end = Min(shown.k_end, end);
        info = {shown, begin, head, !is_clean};
        is_slice_done = !SkipBlock(params);
      }
    }
    is_slice_done = __shfl_sync(~0u, is_slice_done, 0);
    if (is_slice_done) FindSlice(work, params, slice + 1, lane, next);
  }

 private:
  // Moves to the next block of the slice, if there is one. Called by one lane.
  __device__ __forceinline__ bool SkipBlock(const WalkParams& params) {
    end -= kQueries;
    if (end > run_begin) return true;
    if (++head == first_head + num_heads) {
      head = first_head;
      columns.end = run_begin;
      if (columns.end <= columns.begin) return false;
      BeginRun(params);
    }
    end = columns.end;
    return true;
  }
  __device__ __forceinline__ void BeginRun(const WalkParams& params) {
    run_begin = Max(columns.begin, columns.end - params.columns_per_head);
    end = columns.end;
  }

  // Moves to the first slice from `from` on that touches the tile, or to that of the next heads.
  // Each lane examines one of 32 slices at a time.
  template <typename Next>
  __device__ __forceinline__ void FindSlice(const WorkParams& work, const WalkParams& params,
                                            int from, int lane, Next next) {
    for (;;) {
      for (int first = from; first < tile.slice_end; first += 32) {
        Range touched{0, 0};
        Slice own{};
        if (first + lane < tile.slice_end) {
          own = LoadTileSlice</*kByKeys=*/true>(work, tile, first + lane);
          touched = TouchedColumns(own, tile, /*aligns_end=*/true);
        }
        const unsigned hits = __ballot_sync(~0u, touched.begin < touched.end);
        if (hits == 0) continue;
        if (lane == __ffs(hits) - 1) {
          slice = first + lane;
          own.q_begin = Max(own.q_begin, tile.begin);
          own.q_end = Min(own.q_end, tile.rows().end);
          current = own;
          columns = touched;
          BeginRun(params);
        }
        __syncwarp();
        return;
      }
      const bool has_heads = first_head + num_heads < head_end;
      __syncwarp();  // All lanes have read what changes.
      if (lane == 0) {
        if (has_heads) {
          first_head += num_heads;
          head = first_head;
        } else {
          is_done = true;
          number = next();
        }
      }
      __syncwarp();
      if (!has_heads) return;
      from = tile.slice_begin;
    }
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BLOCK_WALK_CUH_
