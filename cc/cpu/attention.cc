#include "cc/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>

#include "cc/cpu/tile_kernels.h"

namespace jax_magi::cpu {
namespace {

// Limits the memory for partial dq: with many threads and few heads it would exceed all other
// memory.
constexpr int64_t kMaxExtraBytes = int64_t{1} << 30;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The batch elements and kv heads whose key tiles one task processes one after another, because
// they add to the same elements of dbias.
struct Team {
  int64_t num_batch = 1, num_heads = 1;
};

Team TeamOf(const BackwardArgs& args) {
  Team team;
  if (args.dbias == nullptr) return team;
  if (args.bias_layout.batch_stride == 0) team.num_batch = args.shape.batch;
  if (args.bias_layout.head_stride == 0) team.num_heads = args.shape.num_kv_heads;
  return team;
}

int64_t NumBiasElements(const AttentionShape& shape, const BiasLayout& layout) {
  return (layout.batch_stride ? shape.batch : 1) * (layout.head_stride ? shape.num_q_heads : 1) *
         (layout.q_stride ? shape.q_len : 1) * shape.k_len;
}

}  // namespace

int64_t ForwardScratch(const AttentionShape& shape) {
  return kTile * (3 * PaddedDim(shape.head_dim) + 2 * PaddedDim(shape.value_dim) + kTile + 4) +
         kTermsScratch;
}

int64_t BackwardScratch(const AttentionShape& shape) {
  return kTile * (6 * PaddedDim(shape.head_dim) + 4 * PaddedDim(shape.value_dim) + 3 * kTile + 2) +
         kTermsScratch;
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
        // The last rows come first: under a causal mask they are the heaviest. Heads vary fastest,
        // so that the query heads of one kv head run together.
        const int64_t q_tile = num_tiles - 1 - task / num_heads;
        const int64_t head = task % num_heads;
        kernels.forward(args, head / shape.num_q_heads, head % shape.num_q_heads, q_tile, scratch,
                        &tile_max[head * num_tiles + q_tile]);
      });
  if (!done) return false;

  for (int64_t head = 0; head < num_heads; ++head) {
    float largest = args.running_out != nullptr ? args.max_logits[head]
                                                : -std::numeric_limits<float>::infinity();
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
  const bool is_running = args.dq_sum != nullptr;
  const int64_t dq_size = shape.batch * shape.num_q_heads *
                          (is_running ? args.dq_sum_words : shape.q_len * shape.head_dim);
  float* dq_sum = is_running ? args.dq_sum : static_cast<float*>(args.dq);
  if (!is_running) std::fill_n(dq_sum, dq_size, 0.0f);
  if (args.dbias != nullptr) {
    std::fill_n(static_cast<float*>(args.dbias), NumBiasElements(shape, args.bias_layout), 0.0f);
  }
  const int64_t num_slopes = args.dslopes == nullptr ? 0 : shape.batch * shape.num_q_heads;
  std::fill_n(args.dslopes, num_slopes, 0.0f);
  if (num_heads == 0 || num_tiles == 0) return true;

  // Key tiles of one head add to the same dq. One task processes all of them in order, so that the
  // sum is reproducible. If there are fewer teams than threads, several tasks share a team's key
  // tiles, and each task has a separate dq.
  const Team team = TeamOf(args);
  const int64_t head_teams = shape.num_kv_heads / team.num_heads;
  const int64_t num_teams = shape.batch / team.num_batch * head_teams;
  const int64_t most_extra = kMaxExtraBytes / (static_cast<int64_t>(sizeof(float)) * dq_size + 1);
  const int64_t num_splits = std::clamp<int64_t>(
      std::min(CeilDiv(2 * num_threads, num_teams), 1 + most_extra), 1, num_tiles);
  const int64_t num_extra = num_splits - 1;
  std::unique_ptr<float[]> extra_dq(new (std::nothrow) float[num_extra * dq_size]);
  if (extra_dq == nullptr) return false;
  std::fill_n(extra_dq.get(), num_extra * dq_size, 0.0f);
  std::unique_ptr<double[]> dslopes(new (std::nothrow) double[num_splits * num_slopes]);
  if (dslopes == nullptr) return false;
  std::fill_n(dslopes.get(), num_splits * num_slopes, 0.0);

  const bool done = parallel_for(
      num_teams * num_splits, BackwardScratch(shape), [&](int64_t task, float* scratch) {
        const int64_t split = task / num_teams;
        const int64_t first_batch = task % num_teams / head_teams * team.num_batch;
        const int64_t first_head = task % head_teams * team.num_heads;
        float* dq = split == 0 ? dq_sum : extra_dq.get() + (split - 1) * dq_size;
        // Every num_splits-th tile, so that tasks have equal work under a causal mask.
        for (int64_t k_tile = split; k_tile < num_tiles; k_tile += num_splits) {
          for (int64_t b = 0; b < team.num_batch; ++b) {
            for (int64_t h = 0; h < team.num_heads; ++h) {
              kernels.backward(args, first_batch + b, first_head + h, k_tile, dq,
                               dslopes.get() + split * num_slopes, scratch);
            }
          }
        }
      });
  if (!done) return false;

  for (int64_t split = 0; split < num_extra; ++split) {
    const float* dq = extra_dq.get() + split * dq_size;
    for (int64_t i = 0; i < dq_size; ++i) dq_sum[i] += dq[i];
  }
  for (int64_t i = 0; i < num_slopes; ++i) {
    double sum = 0.0;
    for (int64_t split = 0; split < num_splits; ++split) sum += dslopes[split * num_slopes + i];
    args.dslopes[i] = static_cast<float>(sum);
  }
  return true;
}

}  // namespace jax_magi::cpu
