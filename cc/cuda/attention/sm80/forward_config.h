// Tile sizes of the forward kernel for sm_80 and later, for each pair of head dims.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_CONFIG_H_
#define JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_CONFIG_H_

#include "cc/architecture.h"

namespace jax_magi::cuda::sm80 {

// From this much shared memory on, a CTA can use the tiles made for sm_80.
constexpr int kMuchSharedMemory = 163 << 10;
// From this much on, an SM has room for two CTAs of 108 KB.
constexpr int kRoomForTwo = 216 << 10;

// A warp has 16 rows of each of kRowGroups groups of 64 rows. Pieces of keys, loaded from shared
// memory, serve all of them. Per row group, a thread holds kBlockN / 2 scores and kValueDim / 2
// floats of the output. Shared memory holds the queries, and a ring of kStages blocks of keys and
// values in turn. kMinCtas run on an SM at a time, if its shared memory allows: the softmax of one
// overlaps with products of another.
template <int kHeadDim, int kValueDim>
struct ForwardTile;

struct UsualForwardTile {
  static constexpr bool kHasPairs = false;  // See forward_pair.cuh.
  static constexpr int kMaxSharedBytes = kLeastSharedMemory;
};

// Shared memory: 64 KB.
template <>
struct ForwardTile<64, 64> : UsualForwardTile {
  static constexpr int kNumWarps = 4, kRowGroups = 2, kBlockN = 128;
  static constexpr int kStages = 3, kMinCtas = 2;
};
// Shared memory: 80 KB, so that two CTAs fit the 164 KB of an SM of sm_80.
template <>
struct ForwardTile<128, 128> : UsualForwardTile {
  static constexpr int kNumWarps = 4, kRowGroups = 2, kBlockN = 64;
  static constexpr int kStages = 3, kMinCtas = 2;
};
// Shared memory: 96 KB.
template <>
struct ForwardTile<192, 128> : UsualForwardTile {
  static constexpr int kNumWarps = 4, kRowGroups = 2, kBlockN = 64;
  static constexpr int kStages = 2, kMinCtas = 2;
};
// The output of 16 rows takes 128 registers. Shared memory: 96 KB.
template <>
struct ForwardTile<256, 256> : UsualForwardTile {
  static constexpr int kNumWarps = 4, kRowGroups = 1, kBlockN = 64;
  static constexpr int kStages = 2, kMinCtas = 2;
};

// Tiles of 256 dims for GPUs with more shared memory. Two warps share 32 rows, which are of two
// pieces in one group. Shared memory: 107 KB with four warps; 150 KB with eight.
template <int kNumWarps_>
struct ForwardPairTile {
  static constexpr bool kHasPairs = true;
  static constexpr int kNumWarps = kNumWarps_, kRowGroups = 1, kBlockN = 64;
  static constexpr int kStages = 2, kMinCtas = kNumWarps == 4 ? 2 : 1;
  static constexpr int kMaxSharedBytes = kNumWarps == 4 ? kRoomForTwo / 2 : kMuchSharedMemory;
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
struct ForwardTermsTile : UsualForwardTile {
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
