// The sequence of key blocks that a query tile meets, for the forward kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_WALK_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_WALK_CUH_

#include "cc/cuda/attention/work.cuh"

namespace jax_magi::cuda::sm80 {

// In shared memory. One warp describes blocks, kPerFill at a time and at least as many ahead; all
// threads read the descriptions.
template <int kBlockN, bool kAlignsEnd>
struct KeyWalk {
  static constexpr int kPerFill = 8;
  BlockInfo blocks[2 * kPerFill];
  // State of the warp.
  int32_t slice, next_slice;  // Slices from next_slice on have not been examined.
  Range keys;                 // The keys of `slice` that are left.
  int32_t skipped;            // Number of blocks that are left to skip.

  __device__ __forceinline__ const BlockInfo& Block(int number) const {
    return blocks[number % (2 * kPerFill)];
  }

  // Begins with a tile whose first `num_skipped` blocks are left out. Called by one lane.
  __device__ __forceinline__ void Start(const Tile& tile, int num_skipped) {
    next_slice = tile.slice_begin;
    keys = {0, 0};
    skipped = num_skipped;
  }

  // Describes blocks number, ..., number + kPerFill - 1, where `number` is a multiple of kPerFill;
  // those before have been described, and those before number - kPerFill are no longer needed.
  // Called by one warp. Blocks go from right to left, so that under a causal mask the diagonal
  // comes first. After the tile's last block, descriptions hide all pairs.
  __device__ __forceinline__ void Fill(const WorkParams& work, const Tile& tile, int number,
                                       int lane) {
    BlockInfo* to = blocks + number % (2 * kPerFill);
    int count = 0;
    while (count < kPerFill) {
      if (keys.begin >= keys.end && !FindSlice(work, tile, lane)) break;
      const int num_left = CeilDiv(keys.end - keys.begin, kBlockN);
      const int num_skipped = Min(skipped, num_left);
      const int num_taken = Min(num_left - num_skipped, kPerFill - count);
      const int end = keys.end - num_skipped * kBlockN;
      if (lane < num_taken) {
        const Slice shown = LoadTileSlice</*kByKeys=*/false>(work, tile, slice);
        const int begin = end - (lane + 1) * kBlockN;
        const bool is_clean = IsClean(shown, tile.rows(), begin, kBlockN);
        to[count + lane] = {shown, begin, is_clean ? 0 : kMasked};
      }
      count += num_taken;
      __syncwarp();  // All lanes have read the state.
      if (lane == 0) {
        keys.end = end - num_taken * kBlockN;
        skipped -= num_skipped;
      }
      __syncwarp();
    }
    if (count <= lane && lane < kPerFill) to[lane] = {Slice{0, 0, 0, 0, 0, 0}, 0, kMasked};
  }

 private:
  // Moves to the next slice that touches the tile, if there is one. Each lane examines one of 32
  // slices at a time.
  __device__ __forceinline__ bool FindSlice(const WorkParams& work, const Tile& tile, int lane) {
    int first = next_slice;
    for (; first < tile.slice_end; first += 32) {
      Range touched{0, 0};
      if (first + lane < tile.slice_end) {
        touched = TouchedColumns(LoadTileSlice</*kByKeys=*/false>(work, tile, first + lane), tile,
                                 kAlignsEnd);
      }
      const unsigned hits = __ballot_sync(~0u, touched.begin < touched.end);
      if (hits == 0) continue;
      if (lane == __ffs(hits) - 1) {
        slice = first + lane;
        next_slice = first + lane + 1;
        keys = touched;
      }
      __syncwarp();
      return true;
    }
    return false;
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_WALK_CUH_
