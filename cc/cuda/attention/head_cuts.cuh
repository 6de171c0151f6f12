// The work items of the backward kernel's producer if heads are split: see head_cuts.h.

#ifndef JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_CUH_

#include "cc/cuda/attention/head_cuts.h"
#include "cc/cuda/attention/work.cuh"

namespace jax_magi::cuda {

struct HeadCutParams {
  HeadCuts cuts;
  TileWeights weights;
  uint32_t group, num_kv_heads;
  uint32_t work_per_section;  // Approximate size of a section.
};

// The numbering of the work, in shared memory. Only the producer uses it. All tiles that are split
// precede the others, so that light work comes last. Each of these two phases is divided into
// sections of kv heads. Within a section, tiles of one weight precede those of the next, and all
// parts of a tile are adjacent.
struct HeadCutWork {
  struct Phase {
    uint32_t num_work;
    uint32_t per_section;  // Number of work items per section.
    uint32_t log_heads;    // Log2 of the number of kv heads per section.
  };
  struct Weight {
    uint32_t first_work;  // Of one kv head, in its phase.
    uint32_t first_tile;
  };
  Phase phases[2];
  Weight weights[kNumWeights];

  // Called by one warp.
  __device__ __forceinline__ void Start(const WorkParams& work, const HeadCutParams& params,
                                        int lane) {
    if (lane == 0) {
      const TileList& list = *work.list;
      const int first_threshold = params.weights.FirstThreshold(list);
      uint32_t per_head = 0, first_tile = 0;
#pragma unroll 1  // Registers are scarce.
      for (int i = 0; i < kNumWeights; ++i) {
        if (i == kNumWeights - 1) {
          SetPhase(phases[0], per_head, params);
          per_head = 0;
        }
        const uint32_t end_tile = params.weights.NumTiles(list, first_threshold, i);
        weights[i] = {per_head, first_tile};
        per_head += (end_tile - first_tile) * params.cuts.num_parts[i] * work.num_repeats;
        first_tile = end_tile;
      }
      SetPhase(phases[1], per_head, params);
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool Has(uint32_t number) const {
    return number < phases[0].num_work + phases[1].num_work;
  }

  // Sets the item to work `number`: its tile, its kv head, its first query head and number of
  // heads, and whether it is a part of a tile. Called by one warp.
  __device__ __forceinline__ void Find(const WorkParams& work, const HeadCutParams& params,
                                       uint32_t number, int lane, WorkItem& item) const {
    const bool is_whole = number >= phases[0].num_work;
    const Phase& phase = phases[is_whole];
    const uint32_t in_phase = is_whole ? number - phases[0].num_work : number;
    const uint32_t section = Divide(in_phase, phase.per_section);
    const uint32_t in_section = in_phase - section * phase.per_section;
    int i = is_whole ? kNumWeights - 1 : 0;
    while (i < kNumWeights - 2 && in_section >= weights[i + 1].first_work << phase.log_heads) ++i;
    const Weight& weight = weights[i];
    const uint32_t in_weight = in_section - (weight.first_work << phase.log_heads);
    const uint32_t num_parts = params.cuts.num_parts[i];
    const uint32_t whole = Divide(in_weight, num_parts);
    const uint32_t repeat = whole >> phase.log_heads;
    const uint32_t index = Divide(repeat, work.num_repeats);
    if (lane == 0) {
      const uint32_t kv_head = (section << phase.log_heads) + whole - (repeat << phase.log_heads);
      const uint32_t skipped = (in_weight - whole * num_parts) * params.cuts.heads_per_part[i];
      item.pack = kv_head;
      item.part = num_parts > 1;
      item.first_head = kv_head * params.group + skipped;
      item.num_heads = min(params.cuts.heads_per_part[i], params.group - skipped);
    }
    CopyTile(work, weight.first_tile + index, lane, item);
    if (lane == 0) item.tile.batch += repeat - index * work.num_repeats;
    __syncwarp();
  }

 private:
  static __device__ __forceinline__ void SetPhase(Phase& phase, uint32_t per_head,
                                                  const HeadCutParams& params) {
    uint32_t log_heads = 0;
    while ((per_head << log_heads) < params.work_per_section &&
           params.num_kv_heads % (2u << log_heads) == 0) {
      ++log_heads;
    }
    phase = {per_head * params.num_kv_heads, per_head << log_heads, log_heads};
  }
};

// An item, and the numbering to find it.
struct HeadCutItem : WorkItem {
  HeadCutWork all;
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_HEAD_CUTS_CUH_
