// The CPU work that is compiled once per instruction set, and the selection of a variant.

#ifndef JAX_MAGI_CPU_TILE_KERNELS_H_
#define JAX_MAGI_CPU_TILE_KERNELS_H_

#include "cc/attention.h"

namespace jax_magi::cpu {

// Rows and keys of a tile. 64 x 64 floats are 16 KB: the score tile and one operand stay in L1.
constexpr int kTile = 64;

// Tile rows are padded to a multiple of two vectors of the widest instruction set.
constexpr int64_t kPad = 32;
constexpr int64_t PaddedDim(int64_t dim) { return (dim + kPad - 1) / kPad * kPad; }

struct TileKernels {
  // Finishes one (batch, query head, query tile). Writes the tile's largest logit to `*tile_max`.
  void (*forward)(const ForwardArgs& args, int64_t batch, int64_t head, int64_t q_tile,
                  float* scratch, float* tile_max);
  // Finishes dk and dv of one (batch, kv head, key tile). Adds to `dq`, laid out as args.dq, or as
  // args.dq_sum if there is one, whose heads are [q_len, head_dim]. If these gradients are
  // requested, adds to args.dbias, and to `dslopes`, laid out as args.dslopes.
  void (*backward)(const BackwardArgs& args, int64_t batch, int64_t kv_head, int64_t k_tile,
                   float* dq, double* dslopes, float* scratch);
};

// The scratch for a bias: a tile as it lies in memory, and its transpose.
constexpr int64_t kTermsScratch = 2 * kTile * kTile;

// Floats of scratch that one call needs, 64-byte aligned.
int64_t ForwardScratch(const AttentionShape& shape);
int64_t BackwardScratch(const AttentionShape& shape);

// The widest variant that this processor supports.
const TileKernels& SelectTileKernels();

}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_TILE_KERNELS_H_
