// Tile sizes of the Hopper forward kernel, one specialisation per pair of head dims.

#ifndef JAX_MAGI_CUDA_CONFIG_H_
#define JAX_MAGI_CUDA_CONFIG_H_

namespace jax_magi::cuda {

// Threads of a warpgroup, the unit that issues wgmma.
constexpr int kWarpgroup = 128;

template <int kHeadDim, int kValueDim>
struct ForwardTile;

// Scores and output live in registers: kBlockN / 2 + kBlockN / 4 + kValueDim / 2 of them a thread,
// of 240 with two consumer warpgroups, 160 with three. K and V take 2 stages of shared memory each.
template <>
struct ForwardTile<64, 64> {
  static constexpr int kNumConsumers = 3, kBlockN = 128;
};
template <>
struct ForwardTile<128, 128> {
  static constexpr int kNumConsumers = 2, kBlockN = 128;
};
template <>
struct ForwardTile<192, 128> {
  static constexpr int kNumConsumers = 2, kBlockN = 112;  // 128 leaves no room for barriers.
};
template <>
struct ForwardTile<256, 256> {
  static constexpr int kNumConsumers = 2, kBlockN = 80;  // 96 exceeds shared memory.
};

template <int kHeadDim_, int kValueDim_, typename Element_>
struct ForwardConfig : ForwardTile<kHeadDim_, kValueDim_> {
  using Element = Element_;
  using Tile = ForwardTile<kHeadDim_, kValueDim_>;
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr int kBlockM = 64 * Tile::kNumConsumers;  // wgmma has 64 rows.
  static constexpr int kStages = 2;
  static constexpr int kNumThreads = kWarpgroup * (1 + Tile::kNumConsumers);
  // setmaxnreg: the producer needs few registers, and gives the rest to the consumers. The sum is
  // bounded by what the block starts with: 168 for 3 warpgroups, 128 for 4.
  static constexpr int kProducerRegisters =
      Tile::kNumConsumers == 3 ? 32 : (kHeadDim > 128 ? 40 : 24);  // More boxes, more registers.
  static constexpr int kConsumerRegisters =
      Tile::kNumConsumers == 3 ? 160 : (kHeadDim > 128 ? 232 : 240);

  static_assert(kHeadDim % 64 == 0 && kValueDim % 64 == 0, "a swizzled panel is 64 wide");
  static_assert(Tile::kBlockN % 16 == 0 && Tile::kBlockN <= 256, "wgmma's N, and TMA's box");
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_CONFIG_H_
