// How the forward kernel's planner splits work: see key_parts.h.

#ifndef JAX_MAGI_CUDA_ATTENTION_KEY_PARTS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_KEY_PARTS_CUH_

#include "cc/cuda/attention/key_parts.h"
#include "cc/cuda/attention/work.cuh"

namespace jax_magi::cuda {

// If the list was made on the device, joins the sections of a call until each has at least twice
// the work of its heaviest tile. A section begins with its heaviest tiles, so at the end of a small
// last section, most SMs would wait for one of them. In exchange, keys may leave the L2 cache
// between two tiles.
__device__ __forceinline__ Section JoinSections(const WorkParams& work, int num_workers) {
  Section section{work.packs_per_section, work.section_work_per_tile};
  const TileList& list = *work.list;
  if (list.num_tiles <= 0 || list.num_blocks <= 0) return section;
  const int64_t enough = int64_t{2} * list.tiles()[0].num_blocks * num_workers;
  while (int64_t{list.num_blocks} * section.work_per_tile < enough &&
         work.work_per_tile % (2 * section.work_per_tile) == 0) {
    section.num_packs *= 2;
    section.work_per_tile *= 2;
  }
  return section;
}

// Which work is split, in shared memory. Only the planner uses it.
template <int kClusterSize, bool kJoinsSections = false>
struct KeyParts {
  uint32_t first;     // Number of the first part; work before it is not split.
  uint32_t end;       // One past the last work number.
  uint32_t per_tile;  // Parts per tile; 0: not planned yet.
  Section section;    // If kJoinsSections.

  // Called by one warp.
  __device__ __forceinline__ void Start(const WorkParams& work, bool may_cut, int lane) {
    if (lane == 0) {
      const uint32_t num_work = work.list->num_tiles * work.work_per_tile;
      const uint32_t rest = may_cut ? num_work % (gridDim.x / kClusterSize) : 0;
      first = num_work - rest;
      end = num_work;
      per_tile = rest == 0;
      if constexpr (kJoinsSections) section = JoinSections(work, gridDim.x / kClusterSize);
    }
    __syncwarp();
  }

  // Whether there is work of this number. Called by one warp.
  __device__ __forceinline__ bool Has(uint32_t number, const WorkParams& work, int lane) {
    if (number < first) return true;
    if (per_tile == 0) Plan(work, lane);
    return number < end;
  }

  // Chooses the number of parts; each lane evaluates a different one.
  __device__ __forceinline__ void Plan(const WorkParams& work, int lane) {
    const uint32_t num_clusters = gridDim.x / kClusterSize, rest = end - first;
    // The estimate assumes the fewest blocks of any tile.
    const uint32_t num_blocks = work.list->least_blocks;
    const uint32_t parts = lane + 1, num_rounds = CeilDiv(rest * parts, num_clusters);
    uint32_t cost = num_rounds * (CeilDiv(num_blocks, parts) + kPartCost) + kJoinCost;
    if (parts == 1) cost = num_blocks;
    if (parts > 1 && rest * parts * kClusterSize > kMaxParts) cost = 1 << 26;
    const uint32_t best = __reduce_min_sync(~0u, cost << 5 | lane) % kMaxPartsOfTile + 1;
    __syncwarp();  // All lanes have read the fields.
    if (lane == 0) {
      end = first + rest * best;
      per_tile = best;
    }
    __syncwarp();
  }

  __device__ __forceinline__ Section SectionOf(const WorkParams& work) const {
    if constexpr (kJoinsSections) return section;
    return {work.packs_per_section, work.section_work_per_tile};
  }

  // The work item that a number belongs to.
  __device__ __forceinline__ uint32_t WorkOf(uint32_t number) const {
    return number < first ? number : first + (number - first) / per_tile;
  }

  // Restricts the item, a whole tile, to the blocks of the part with this number. Called by one
  // lane.
  __device__ __forceinline__ void Cut(uint32_t number, WorkItem& item) const {
    item.skipped = item.part = 0;
    if (number < first || per_tile == 1) return;
    const uint32_t part = (number - first) % per_tile;
    const uint32_t num_blocks = item.tile.num_blocks;
    item.skipped = part * num_blocks / per_tile;
    item.tile.num_blocks = (part + 1) * num_blocks / per_tile - item.skipped;
    item.part = per_tile << 16 | (number - first);
  }
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_KEY_PARTS_CUH_
