// Tile sizes of the forward kernel for sm_80 and later, for each pair of head dims.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_CONFIG_H_
#define JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_CONFIG_H_

#include "cc/architecture.h"

namespace jax_magi::cuda::sm80 {

// From this much shared memory on, a CTA can use the tiles made for sm_80.
constexpr int kMuchSharedMemory = 163 << 10;
// From this much on, an SM has room for two CTAs with the tiles made for 99 KB. With 256 dims, they
// took 10% less time on an H200 than one CTA with the tile made for sm_80.
constexpr int kRoomForTwo = 2 * kLeastSharedMemory;

// A warp has 16 rows of each of kRowGroups groups of 64 rows. Pieces of keys, loaded from shared
// memory, serve all of them. Per row group, a thread holds kBlockN / 2 scores and kValueDim / 2
// floats of the output. Shared memory holds the queries, and a ring of kStages blocks of keys and
// values in turn. kMinCtas run on an SM at a time, if its shared memory allows: the softmax of one
// overlaps with products of another.
template <int kHeadDim, int kValueDim, bool kHasMuchMemory>
struct ForwardTile;

// Shared memory: 64 KB.
template <bool kHasMuchMemory>
struct ForwardTile<64, 64, kHasMuchMemory> {
  static constexpr bool kIsLarge = false;
  static constexpr int kNumWarps = 4, kRowGroups = 2, kBlockN = 128;
  static constexpr int kStages = 3, kMinCtas = 2;
};
// Shared memory: 80 KB, so that two CTAs fit the 164 KB of an SM of sm_80.
template <bool kHasMuchMemory>
struct ForwardTile<128, 128, kHasMuchMemory> {
  static constexpr bool kIsLarge = false;
  static constexpr int kNumWarps = 4, kRowGroups = 2, kBlockN = 64;
  static constexpr int kStages = 3, kMinCtas = 2;
};
// Shared memory: 96 KB.
template <bool kHasMuchMemory>
struct ForwardTile<192, 128, kHasMuchMemory> {
  static constexpr bool kIsLarge = false;
  static constexpr int kNumWarps = 4, kRowGroups = 2, kBlockN = 64;
  static constexpr int kStages = 2, kMinCtas = 2;
};
// The output of 16 rows takes 128 registers. Shared memory: 160 KB.
template <>
struct ForwardTile<256, 256, true> {
  static constexpr bool kIsLarge = true;
  static constexpr int kNumWarps = 8, kRowGroups = 1, kBlockN = 64;
  static constexpr int kStages = 3, kMinCtas = 1;
};
// Shared memory: 96 KB.
template <>
struct ForwardTile<256, 256, false> {
  static constexpr bool kIsLarge = false;
  static constexpr int kNumWarps = 4, kRowGroups = 1, kBlockN = 64;
  static constexpr int kStages = 2, kMinCtas = 2;
};

template <int kHeadDim_, int kValueDim_, typename Element_, bool kHasSoftcap_, typename Tile_>
struct ForwardConfig : Tile_ {
  using Element = Element_;
  using Tile = Tile_;
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  // A runtime branch would cost registers in every variant.
  static constexpr bool kHasSoftcap = kHasSoftcap_;
  static constexpr bool kHasTerms = false;
  static constexpr int kNumThreads = 32 * Tile::kNumWarps;
  static constexpr int kBlockM = 16 * Tile::kNumWarps * Tile::kRowGroups;
  // A block of keys or values.
  static constexpr int kStageBytes =
      2 * Tile::kBlockN * (kHeadDim > kValueDim ? kHeadDim : kValueDim);
  // What kHasMuchMemory stands for.
  static constexpr int kSharedLimit = Tile::kIsLarge ? kMuchSharedMemory : kLeastSharedMemory;
  // What the epilogue and the reduction of parts ask for: groups of 64 rows, whether the output may
  // be float32, and whether CTAs form clusters.
  static constexpr int kNumConsumers = kBlockM / 64;
  static constexpr bool kIsOutFloat = true;
  static constexpr int kClusterSize = 1;
  // Whether registers hold only a part of what the epilogue and the reduction load at a time.
  static constexpr bool kLoadsInChunks = kValueDim > 128;

  static_assert(Tile::kNumWarps % 4 == 0, "four warps have a group of 64 rows");
  static_assert(Tile::kNumWarps == 4 || Tile::kRowGroups == 1, "as Group() tells them apart");
  static_assert(Tile::kBlockN % (4 * Tile::kNumWarps) == 0, "as CopyRows shares rows");
};

// With terms, a warp has 16 rows: a block's bias is in registers, too.
template <int kHeadDim, int kValueDim>
struct ForwardTermsTile {
  static constexpr bool kIsLarge = false;
  static constexpr int kNumWarps = 4, kRowGroups = 1, kBlockN = 64;
  // Shared memory: 32 KB with 64 dims, 64 KB with 128, 72 KB with 192 and 128, 96 KB with 256.
  static constexpr int kStages = kHeadDim <= 128 ? 3 : 2;
  static constexpr int kMinCtas = kHeadDim == 64 ? 3 : 2;
};
// One kernel supports all terms, with a cap and without: a build should cost little.
template <int kHeadDim_, int kValueDim_, typename Element_>
struct ForwardTermsConfig : ForwardConfig<kHeadDim_, kValueDim_, Element_, /*kHasSoftcap=*/true,
                                          ForwardTermsTile<kHeadDim_, kValueDim_>> {
  static constexpr bool kHasTerms = true;
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_CONFIG_H_
