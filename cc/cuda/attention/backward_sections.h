// The order in which the backward kernel's work is handed out, and in which a tile's blocks are
// processed.

#ifndef JAX_MAGI_CUDA_ATTENTION_BACKWARD_SECTIONS_H_
#define JAX_MAGI_CUDA_ATTENTION_BACKWARD_SECTIONS_H_

#include <algorithm>
#include <limits>

#include "cc/cuda/attention/attention.h"

namespace jax_magi::cuda {

// The amount of work in progress at a time should be about the number of CTAs that run, and no
// more: these then read the same queries at about the same time. If additions are ordered, tiles
// wait for those of the same heads, and wait less the more heads there are. But there must not be
// so many that their queries leave the L2 cache, as they do if tiles are long. Per SM:
constexpr int kWorkPerSm = 2, kWorkPerSmInOrder = 4;
// The number of columns processed for all query heads in turn before the next columns: more than a
// typical window, and few enough to stay in the L2 cache. If additions are ordered, tiles that
// begin late under a causal mask wait longer the larger this number is.
constexpr int kColumnsPerHead = 2048, kColumnsPerHeadInOrder = 640;

inline int64_t WorkPerSection(const LaunchOptions& options) {
  return int64_t{kWorkPerSm} * options.num_sms;
}

// The kv heads whose work is in progress at a time.
inline int HeadsPerSection(const AttentionShape& shape, const Tiling& tiling, int num_parts,
                           bool is_fixed, int cluster_size, const LaunchOptions& options) {
  const int64_t tiles_per_list = std::max(CeilDiv(NumRows(shape, tiling), tiling.num_rows), 1);
  const int64_t num_tiles = std::max<int64_t>(shape.batch, 1) * tiles_per_list;
  // A threshold between documents with 15 blocks per tile and 16k causal tokens with 100.
  const bool has_long_tiles = options.num_blocks >= 64 * tiles_per_list;
  const int64_t most_work = !is_fixed        ? WorkPerSection(options) / cluster_size
                            : has_long_tiles ? int64_t{kWorkPerSmInOrder} * options.num_sms
                                             : std::numeric_limits<int64_t>::max();
  const int64_t num_kv_heads = shape.num_kv_heads;
  int64_t heads_per_section =
      std::clamp<int64_t>(most_work / (num_tiles * num_parts), 1, num_kv_heads);
  while (num_kv_heads % heads_per_section) --heads_per_section;
  return static_cast<int>(heads_per_section);
}

inline int ColumnsPerHead(bool is_fixed, int block_columns) {
  return (is_fixed ? kColumnsPerHeadInOrder : kColumnsPerHead) / block_columns * block_columns;
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_BACKWARD_SECTIONS_H_
