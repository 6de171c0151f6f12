// What the forward kernels know of the tile that they process.

#ifndef JAX_MAGI_CUDA_ATTENTION_TILE_INFO_H_
#define JAX_MAGI_CUDA_ATTENTION_TILE_INFO_H_

#include <cstdint>

namespace jax_magi::cuda {

// One query tile of one head, or of several packed heads. num_blocks < 0: no more work.
struct alignas(16) TileInfo {
  int32_t batch, head, num_heads, log2_pack, begin, num_rows, num_blocks;
  int32_t part;  // See WorkItem.
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TILE_INFO_H_
