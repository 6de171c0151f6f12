#include "cc/cuda/attention/tile_plan.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "cc/cuda/attention/tile_cuts.h"

namespace jax_magi::cuda {
namespace {

// In quarters of the time of one block: the block itself, the extra cost of masking it, and the
// cost of a tile besides its blocks. Estimated from instruction counts.
constexpr int64_t kBlockCost = 4, kMaskCost = 1, kTileCost = 4;
// Limit on slices examined in the search for the best cuts, which bounds the search to about 0.1 s.
constexpr int64_t kMostVisits = 1 << 25;
// Number of slice boundaries that are tried as the end of a tile, besides the end of a full tile.
constexpr int kMostEnds = 8;

// The cost of tiles of one slice list.
class TileCosts {
 public:
  TileCosts(const CutArgs& args, int group) : args_(args), group_(group) {
    for (int i = 0; i < args.num_slices; ++i) {
      const Slice slice = LoadSlice(args.slices, i, args.num_rows, args.num_columns, args.by_keys);
      if (slice.q_begin < slice.q_end && slice.k_begin < slice.k_end) slices_.push_back(slice);
    }
    std::sort(slices_.begin(), slices_.end(),
              [](const Slice& a, const Slice& b) { return a.q_begin < b.q_begin; });
    for (const Slice& slice : slices_) {
      last_end_.push_back(Max(slice.q_end, last_end_.empty() ? 0 : last_end_.back()));
    }
  }

  // The cost of the tile with these rows, for all query heads of a kv head.
  int64_t Cost(Range rows) {
    // All slices before `first` end at or before the tile's first row.
    const auto first = std::upper_bound(last_end_.begin(), last_end_.end(), rows.begin);
    int64_t cost = kTileCost;
    for (size_t i = first - last_end_.begin(); i < slices_.size(); ++i) {
      if (slices_[i].q_begin >= rows.end) break;
      ++num_visits_;
      cost += SliceCost(slices_[i], rows);
    }
    return cost * CeilDiv(group_, NumPacked(rows.end - rows.begin));
  }
  int64_t num_visits() const { return num_visits_; }

 private:
  int64_t SliceCost(const Slice& slice, Range rows) const {
    const Range own = Intersect(rows, {slice.q_begin, slice.q_end});
    if (own.begin >= own.end) return 0;
    const Range touched = TouchedKeys(slice, own);
    if (touched.begin >= touched.end) return 0;
    const int width = static_cast<int>(args_.block_columns.divisor);
    const int num_blocks = CeilDiv(touched.end - touched.begin, width);
    int num_clean = 0;
    if (own.begin == rows.begin && own.end == rows.end) {  // Otherwise every block has hidden rows.
      // Blocks are laid out from right to left.
      const Range clean = CleanKeys(slice, rows);
      const int left = Min(touched.end - clean.begin, touched.end - touched.begin) / width;
      const int right = CeilDiv(Max(touched.end - clean.end, 0), width);
      num_clean = Max(left - right, 0);
    }
    return kBlockCost * num_blocks + kMaskCost * (num_blocks - num_clean);
  }

  // Number of query heads that share a tile of few rows.
  int NumPacked(int num_rows) const {
    constexpr int kMost = 4;
    int pack = 1;
    while (pack < Min(group_, kMost) && 2 * pack * num_rows <= int(args_.tile_rows.divisor)) {
      pack *= 2;
    }
    return pack;
  }

  const CutArgs& args_;
  int group_;
  std::vector<Slice> slices_;  // Sorted by first row.
  std::vector<int> last_end_;  // The largest end among each slice and those before it.
  int64_t num_visits_ = 0;
};

// Rows at which a tile may begin or end: 0, `args.num_rows`, and where slices begin or end.
std::vector<int> CutRows(const CutArgs& args) {
  std::vector<int> rows{args.num_rows};
  for (int i = 0; i < static_cast<int>(args.candidates_per_list.divisor); ++i) {
    rows.push_back(CutRow(args, args.slices, i));
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

// The first rows of tiles, then `args.num_rows`, if every cut is made that IsCutKept accepts, as on
// the device.
std::vector<int> UsualCuts(const CutArgs& args, const std::vector<int>& rows) {
  std::vector<int> begins{0};
  for (size_t i = 1; i < rows.size(); ++i) {
    const bool is_end = i + 1 == rows.size();
    if (!is_end && !IsCutKept(rows[i - 1], rows[i])) continue;
    const int step = static_cast<int>(args.tile_rows.divisor);
    while (rows[i] - begins.back() > step) begins.push_back(begins.back() + step);
    begins.push_back(rows[i]);
  }
  return begins;
}

// The same for the cheapest tiles; empty if finding them takes too long. Tiles are full, or end
// where a slice begins or ends. Cutting at a slice is not always best: a tile of few rows costs as
// much as a full one, but a tile with rows of two slices processes the keys of both.
std::vector<int> BestCuts(const CutArgs& args, const std::vector<int>& rows, TileCosts& costs) {
  struct Step {
    int row;
    int64_t cost;  // The cost of the tiles before it.
    int previous;  // The index of the step where the last of those tiles begins.
  };
  std::vector<Step> steps;  // Sorted by row.
  std::map<int, Step> open{{0, {0, 0, -1}}};
  const int most_rows = static_cast<int>(args.tile_rows.divisor);
  while (open.begin()->first < args.num_rows) {
    const Step step = open.begin()->second;
    open.erase(open.begin());
    // A step further on that costs no more is better: fewer remaining rows never cost more.
    if (std::any_of(open.begin(), open.end(),
                    [&](const auto& other) { return other.second.cost <= step.cost; })) {
      continue;
    }
    const int index = static_cast<int>(steps.size());
    steps.push_back(step);
    const auto extend = [&](int end) {
      const int64_t cost = step.cost + costs.Cost({step.row, end});
      const auto [other, is_new] = open.try_emplace(end, Step{end, cost, index});
      if (!is_new && cost < other->second.cost) other->second = {end, cost, index};
    };
    const int furthest = Min(step.row + most_rows, args.num_rows);
    extend(furthest);
    auto end = std::lower_bound(rows.begin(), rows.end(), furthest);
    for (int i = 0; i < kMostEnds && end != rows.begin() && *--end > step.row; ++i) extend(*end);
    if (costs.num_visits() > kMostVisits) return {};
  }
  std::vector<int> begins{args.num_rows};
  for (int i = open.begin()->second.previous; i >= 0; i = steps[i].previous) {
    begins.push_back(steps[i].row);
  }
  std::reverse(begins.begin(), begins.end());
  return begins;
}

const TileList& ListOf(const std::vector<int32_t>& words) {
  return *reinterpret_cast<const TileList*>(words.data());
}

int64_t NumBlocks(const TileList& list) {
  int64_t num_blocks = 0;
  for (int i = 0; i < list.num_tiles; ++i) num_blocks += list.tiles()[i].num_blocks;
  return num_blocks;
}

// Minimum average number of blocks per cluster tile. On an H200, clusters gain 1 to 2% with 52 or
// more blocks per tile (128 dims: full masks of 4k and causal ones of 8k tokens, 64 dims: of 8k and
// 16k), and nothing with 33 (64 dims, causal, 8k).
constexpr int64_t kLeastClusterBlocks = 48;
// At most one in this many blocks may be processed by a CTA that does not see it.
constexpr int64_t kVain = 50;

}  // namespace

TilePlan PlanTiles(const AttentionShape& shape, const Tiling& tiling, const Slice* slices) {
  const CutArgs args(shape, tiling, slices);
  const std::vector<int> rows = CutRows(args);
  const bool has_group = !tiling.by_keys && shape.num_kv_heads > 0;
  TileCosts costs(args, has_group ? static_cast<int>(shape.group()) : 1);
  std::vector<int> begins;
  if (!tiling.by_keys) begins = BestCuts(args, rows, costs);
  if (begins.empty()) begins = UsualCuts(args, rows);

  TilePlan plan;
  std::vector<Tile> tiles;
  for (int i = 0; i + 1 < static_cast<int>(begins.size()); ++i) {
    tiles.push_back(CutTile(args, {/*batch=*/0, begins[i], begins[i + 1], i, 1}, i));
    plan.cost += costs.Cost({begins[i], begins[i + 1]});
  }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Tile& a, const Tile& b) { return a.num_blocks > b.num_blocks; });
  for (size_t i = 0; i < tiles.size(); ++i) tiles[i].index = static_cast<int32_t>(i);
  plan.tile_list.resize((sizeof(TileList) + tiles.size() * sizeof(Tile)) / sizeof(int32_t));
  auto* list = reinterpret_cast<TileList*>(plan.tile_list.data());
  list->num_tiles = static_cast<int>(tiles.size());
  list->key = KeyOf(shape, tiling);
  list->least_blocks = tiles.empty() ? 0 : tiles.back().num_blocks;
  std::copy(tiles.begin(), tiles.end(), list->tiles());
  return plan;
}

int64_t NumBlocks(const std::vector<int32_t>& tile_list) { return NumBlocks(ListOf(tile_list)); }

bool MayBeBetterInClusters(const std::vector<int32_t>& tile_list) {
  // The cluster list has at least half as many tiles, and at most half as many blocks plus those
  // that a CTA processes without seeing them.
  const TileList& list = ListOf(tile_list);
  return (kVain + 1) * NumBlocks(list) >= kVain * kLeastClusterBlocks * list.num_tiles;
}

bool IsBetterInClusters(const Tiling& tiling, const std::vector<int32_t>& tile_list,
                        const std::vector<int32_t>& cluster_list) {
  const TileList& list = ListOf(cluster_list);
  for (int i = 0; i < list.num_tiles; ++i) {
    // A CTA without rows would load the rows behind the tile, which may contain NaN.
    const Tile& tile = list.tiles()[i];
    if (tile.num_blocks > 0 && tile.num_rows <= tiling.num_rows) return false;
  }
  const int64_t num_alone = NumBlocks(ListOf(tile_list)), num_blocks = NumBlocks(list);
  return list.num_tiles > 0 && num_blocks >= kLeastClusterBlocks * list.num_tiles &&
         2 * num_blocks - num_alone <= num_alone / kVain;
}

}  // namespace jax_magi::cuda
