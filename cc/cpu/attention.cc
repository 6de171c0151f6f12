#include "cc/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>

#include "cc/cpu/tile_kernels.h"

namespace jax_magi::cpu {
namespace {

// Of memory for partial dq: with many threads and few heads they would outgrow everything else.
constexpr int64_t kMaxExtraBytes = int64_t{1} << 30;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t ForwardScratch(const AttentionShape& shape) {
  return kTile * (3 * PaddedDim(shape.head_dim) + 2 * PaddedDim(shape.value_dim) + kTile + 4);
}

int64_t BackwardScratch(const AttentionShape& shape) {
  return kTile * (6 * PaddedDim(shape.head_dim) + 4 * PaddedDim(shape.value_dim) + 3 * kTile + 2);
}

bool AttentionForward(const ForwardArgs& args, const ParallelFor& parallel_for) {
  const AttentionShape& shape = args.shape;
  const TileKernels& kernels = SelectTileKernels();
  const int64_t num_heads = shape.batch * shape.num_q_heads;
  const int64_t num_tiles = CeilDiv(shape.q_len, kTile);

  std::unique_ptr<float[]> tile_max(new (std::nothrow) float[num_heads * num_tiles]);
  if (tile_max == nullptr) return false;

  const bool done =
      parallel_for(num_heads * num_tiles, ForwardScratch(shape), [&](int64_t task, float* scratch) {
        // Last rows first: under a causal mask they are the heaviest. Heads vary fastest, so that
        // the query heads of one kv head run together.
        const int64_t q_tile = num_tiles - 1 - task / num_heads;
        const int64_t head = task % num_heads;
        kernels.forward(args, head / shape.num_q_heads, head % shape.num_q_heads, q_tile, scratch,
                        &tile_max[head * num_tiles + q_tile]);
      });
  if (!done) return false;

  for (int64_t head = 0; head < num_heads; ++head) {
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const float logit = tile_max[head * num_tiles + tile];
      if (!std::isnan(largest) && !(largest >= logit)) largest = logit;
    }
    args.max_logits[head] = largest;
  }
  return true;
}

bool AttentionBackward(const BackwardArgs& args, int64_t num_threads,
                       const ParallelFor& parallel_for) {
  const AttentionShape& shape = args.shape;
  const TileKernels& kernels = SelectTileKernels();
  const int64_t num_heads = shape.batch * shape.num_kv_heads;
  const int64_t num_tiles = CeilDiv(shape.k_len, kTile);
  const int64_t dq_size = shape.batch * shape.q_len * shape.num_q_heads * shape.head_dim;
  float* dq_sum = static_cast<float*>(args.dq);
  std::fill_n(dq_sum, dq_size, 0.0f);
  if (num_heads == 0 || num_tiles == 0) return true;

  // Key tiles of one head add to the same dq. One task takes them all, in order, so the sum is the
  // same every time; where heads are fewer than threads, several tasks share a head's key tiles,
  // each with a dq of its own.
  const int64_t most_extra = kMaxExtraBytes / (static_cast<int64_t>(sizeof(float)) * dq_size + 1);
  const int64_t num_splits = std::clamp<int64_t>(
      std::min(CeilDiv(2 * num_threads, num_heads), 1 + most_extra), 1, num_tiles);
  const int64_t num_extra = num_splits - 1;
  std::unique_ptr<float[]> extra_dq(new (std::nothrow) float[num_extra * dq_size]);
  if (extra_dq == nullptr) return false;
  std::fill_n(extra_dq.get(), num_extra * dq_size, 0.0f);

  const bool done = parallel_for(
      num_heads * num_splits, BackwardScratch(shape), [&](int64_t task, float* scratch) {
        const int64_t split = task / num_heads;
        const int64_t head = task % num_heads;
        float* dq = split == 0 ? dq_sum : extra_dq.get() + (split - 1) * dq_size;
        // Every num_splits-th tile: a causal mask gives all tasks the same work.
        for (int64_t k_tile = split; k_tile < num_tiles; k_tile += num_splits) {
          kernels.backward(args, head / shape.num_kv_heads, head % shape.num_kv_heads, k_tile, dq,
                           scratch);
        }
      });
  if (!done) return false;

  for (int64_t split = 0; split < num_extra; ++split) {
    const float* dq = extra_dq.get() + split * dq_size;
    for (int64_t i = 0; i < dq_size; ++i) dq_sum[i] += dq[i];
  }
  return true;
}

}  // namespace jax_magi::cpu
