#include "cc/cuda/attention/tile_plan.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "cc/cuda/attention/tile_cuts.h"

namespace jax_magi::cuda {
namespace {

// In quarters of the time of a block: that block, what a mask adds to it, and what a tile takes
// besides its blocks. Estimates, from the number of instructions.
constexpr int64_t kBlockCost = 4, kMaskCost = 1, kTileCost = 4;
// Slices that may be looked at for the best cuts: about a tenth of a second.
constexpr int64_t kMostVisits = 1 << 25;
// Ends of a tile that are tried, besides that of a full one.
constexpr int kMostEnds = 8;

// What tiles of a slice list cost.
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

  // Of the tile with these rows, for all query heads of a kv head.
  int64_t Cost(Range rows) {
    // All slices before the first of these end at or before the tile's first row.
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
    if (own.begin == rows.begin && own.end == rows.end) {  // Else rows are hidden in every block.
      // Blocks are laid from right to left.
      const Range clean = CleanKeys(slice, rows);
      const int left = Min(touched.end - clean.begin, touched.end - touched.begin) / width;
      const int right = CeilDiv(Max(touched.end - clean.end, 0), width);
      num_clean = Max(left - right, 0);
    }
    return kBlockCost * num_blocks + kMaskCost * (num_blocks - num_clean);
  }

  // Query heads that share a tile of few rows.
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
  std::vector<Slice> slices_;  // By first row.
  std::vector<int> last_end_;  // The largest end of a slice and those before it.
  int64_t num_visits_ = 0;
};

// Rows at which a tile may begin or end: 0 and `args.num_rows`, and where slices do.
std::vector<int> CutRows(const CutArgs& args) {
  std::vector<int> rows{args.num_rows};
  for (int i = 0; i < static_cast<int>(args.candidates_per_list.divisor); ++i) {
    rows.push_back(CutRow(args, args.slices, i));
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

// Where tiles begin, and `args.num_rows`, if each is cut that is long enough: as on the device.
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

// The same, such that tiles cost least; none if it takes too long to find them. Tiles are full or
// end where a slice begins or ends. Cutting there is not always best: a tile of few rows costs as
// much as a full one, but a tile with rows of two slices has to meet the keys of both.
std::vector<int> BestCuts(const CutArgs& args, const std::vector<int>& rows, TileCosts& costs) {
  struct Step {
    int row;
    int64_t cost;  // Of tiles before it.
    int previous;  // Index of the step where the last of them begins.
  };
  std::vector<Step> steps;  // In order of rows.
  std::map<int, Step> open{{0, {0, 0, -1}}};
  const int most_rows = static_cast<int>(args.tile_rows.divisor);
  while (open.begin()->first < args.num_rows) {
    const Step step = open.begin()->second;
    open.erase(open.begin());
    // One that is further on and has cost no more is better: fewer rows never cost more.
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

// In clusters, on average. On an H200, they are worth 1 to 2% with 52 blocks a tile and more (128
// dims: full masks of 4k and causal ones of 8k tokens, 64 dims: of 8k and 16k), and nothing with 33
// (64 dims, causal, 8k).
constexpr int64_t kLeastClusterBlocks = 48;
// And no more than one block in so many may be met in vain.
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
  // Tiles of clusters are at least half as many, with at most half as many blocks and those in
  // vain.
  const TileList& list = ListOf(tile_list);
  return (kVain + 1) * NumBlocks(list) >= kVain * kLeastClusterBlocks * list.num_tiles;
}

bool IsBetterInClusters(const Tiling& tiling, const std::vector<int32_t>& tile_list,
                        const std::vector<int32_t>& cluster_list) {
  const TileList& list = ListOf(cluster_list);
  for (int i = 0; i < list.num_tiles; ++i) {
    // A block of threads without rows would load those behind the tile, where a NaN may lie.
    const Tile& tile = list.tiles()[i];
    if (tile.num_blocks > 0 && tile.num_rows <= tiling.num_rows) return false;
  }
  const int64_t num_alone = NumBlocks(ListOf(tile_list)), num_blocks = NumBlocks(list);
  return list.num_tiles > 0 && num_blocks >= kLeastClusterBlocks * list.num_tiles &&
         2 * num_blocks - num_alone <= num_alone / kVain;
}

}  // namespace jax_magi::cuda
