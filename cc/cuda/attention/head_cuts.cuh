// The work items of the backward kernel's producer if heads are split: see head_cuts.h.

#ifndef JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_CUH_

#include "cc/cuda/attention/head_cuts.h"
#include "cc/cuda/attention/work.cuh"

namespace jax_magi::cuda {

struct HeadCutParams {
  HeadCuts cuts;
  uint32_t group, num_kv_heads;
  uint32_t work_per_section;  // Approximate size of a section.
};

// The numbering of the work, in shared memory. Only the producer uses it. All tiles of one weight,
// for all heads, precede those of the next. Within a weight, sections of kv heads follow one
// another; within a section, all parts of a tile are adjacent.
struct HeadCutWork {
  struct alignas(16) Weight {
    uint32_t first_work, first_tile;
    uint32_t per_section;  // Number of work items per section.
    uint32_t log_heads;    // Log2 of the number of kv heads per section.
  };
  Weight weights[kNumWeights];
  uint32_t num_work;

  // Called by one warp.
  __device__ __forceinline__ void Start(const WorkParams& work, const HeadCutParams& params,
                                        int lane) {
    if (lane == 0) {
      const TileList& list = *work.list;
      uint32_t first_work = 0, first_tile = 0;
#pragma unroll 1  // Registers are scarce.
      for (int i = 0; i < kNumWeights; ++i) {
        const uint32_t end_tile = i < kNumThresholds ? list.num_above[i] : list.num_tiles;
        const uint32_t per_head =
            (end_tile - first_tile) * params.cuts.num_parts[i] * work.num_repeats;
        uint32_t log_heads = 0;
        while ((per_head << log_heads) < params.work_per_section &&
               params.num_kv_heads % (2u << log_heads) == 0) {
          ++log_heads;
        }
        weights[i] = {first_work, first_tile, per_head << log_heads, log_heads};
        first_work += per_head * params.num_kv_heads;
        first_tile = end_tile;
      }
      num_work = first_work;
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool Has(uint32_t number) const { return number < num_work; }

  // Sets the item to work `number`: its tile, its kv head, its first query head and number of
  // heads, and whether it is a part of a tile. Called by one warp.
  __device__ __forceinline__ void Find(const WorkParams& work, const HeadCutParams& params,
                                       uint32_t number, int lane, WorkItem& item) const {
    int i = 0;
    while (i < kNumWeights - 1 && number >= weights[i + 1].first_work) ++i;
    const Weight& weight = weights[i];
    const uint32_t in_weight = number - weight.first_work;
    const uint32_t section = Divide(in_weight, weight.per_section);
    const uint32_t in_section = in_weight - section * weight.per_section;
    const uint32_t num_parts = params.cuts.num_parts[i];
    const uint32_t whole = Divide(in_section, num_parts);
    const uint32_t repeat = whole >> weight.log_heads;
    const uint32_t index = Divide(repeat, work.num_repeats);
    if (lane == 0) {
      const uint32_t kv_head = (section << weight.log_heads) + whole - (repeat << weight.log_heads);
      const uint32_t skipped = (in_section - whole * num_parts) * params.cuts.heads_per_part[i];
      item.pack = kv_head;
      item.part = num_parts > 1;
      item.first_head = kv_head * params.group + skipped;
      item.num_heads = min(params.cuts.heads_per_part[i], params.group - skipped);
    }
    CopyTile(work, weight.first_tile + index, lane, item);
    if (lane == 0) item.tile.batch += repeat - index * work.num_repeats;
    __syncwarp();
  }
};

// An item, and the numbering to find it.
struct HeadCutItem : WorkItem {
  HeadCutWork all;
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_CUH_
