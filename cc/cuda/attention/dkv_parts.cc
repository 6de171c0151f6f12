#include "cc/cuda/attention/dkv_parts.h"

#include <algorithm>
#include <functional>
#include <queue>

namespace jax_magi::cuda {
namespace {

// An H100 or H200 with SXM. A call may be traced without a device.
constexpr int kUsualSms = 132;

// Costs in units of one column block for one head, about 3 us. They are estimates from times of 1,
// 2 and 6 parts with 2k tokens and 128 dims.
constexpr double kItemCost = 0.7;           // Loading a key tile and storing its gradients.
constexpr double kSumCost = 0.5;            // Summing any parts: a longer last kernel.
constexpr double kBytesOfBlockTime = 12e6;  // Memory traffic per unit of cost.

// The time when the last of `num_workers` finishes, if each always takes the heaviest remaining
// work. Each tile occurs `num_copies` times, for `heads_per_part` query heads.
double Makespan(int num_workers, const std::vector<int>& blocks_of_tiles, int64_t num_copies,
                int heads_per_part) {
  std::priority_queue<double, std::vector<double>, std::greater<double>> free_at;
  for (int i = 0; i < num_workers; ++i) free_at.push(0.0);
  double last = 0.0;
  for (int num_blocks : blocks_of_tiles) {
    for (int64_t copy = 0; copy < num_copies; ++copy) {
      const double end = free_at.top() + kItemCost + double(num_blocks) * heads_per_part;
      free_at.pop();
      free_at.push(end);
      last = std::max(last, end);
    }
  }
  return last;
}

}  // namespace

int NumDkvParts(const AttentionShape& shape, const Tiling& tiling,
                const std::vector<int32_t>& tile_list, int cluster_size, int num_sms) {
  if (shape.num_kv_heads == 0 || shape.group() <= 1) return 1;
  // The number of blocks of each tile, the heaviest first, for each mask that the call may have.
  std::vector<std::vector<int>> masks;
  if (!tile_list.empty()) {
    const auto* list = reinterpret_cast<const TileList*>(tile_list.data());
    std::vector<int> known;
    for (int i = 0; i < list->num_tiles; ++i) known.push_back(list->tiles()[i].num_blocks);
    masks = {known};
  } else {
    const int num_tiles = CeilDiv(NumRows(shape, tiling), tiling.num_rows);
    const int num_blocks = CeilDiv(NumColumns(shape, tiling), tiling.num_columns);
    std::vector<int> full(num_tiles, num_blocks), causal;
    for (int i = num_tiles; i > 0; --i) {
      causal.push_back(static_cast<int>(int64_t{num_blocks} * i / num_tiles));
    }
    masks = {full, causal};
  }
  const int64_t num_copies = shape.batch * shape.num_kv_heads;
  const int num_workers = (num_sms > 0 ? num_sms : kUsualSms) / cluster_size;
  // With this much work, all workers are busy until near the end.
  constexpr int64_t kPlenty = 8;
  if (num_copies * static_cast<int64_t>(masks[0].size()) >= kPlenty * num_workers) return 1;

  const double bytes_of_part = 2.0 * sizeof(float) * shape.batch * shape.k_len *
                               shape.num_kv_heads * (shape.head_dim + shape.value_dim);
  const int group = static_cast<int>(shape.group());
  int best = 1;
  double best_cost = 0.0;
  for (int parts = 1; parts <= group; ++parts) {
    if (group % parts != 0) continue;
    double cost = 0.0;
    for (const auto& mask : masks) {
      cost += Makespan(num_workers, mask, num_copies * parts, group / parts);
      if (parts > 1) cost += kSumCost + parts * bytes_of_part / kBytesOfBlockTime;
    }
    if (parts == 1 || cost < best_cost) {
      best = parts;
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace jax_magi::cuda
