// One variant of the forward kernel for scores with terms; CMakeLists.txt names it.

#include <type_traits>

#include "cc/cuda/attention/sm90/forward_launch.cuh"
#include "cc/cuda/attention/sm90/terms_config.h"

namespace jax_magi::cuda::sm90 {
namespace {

// Launches a kernel of up to 128 dims.
template <int kHeadDim, typename Element>
Status LaunchNarrow(const ForwardArgs& args, bool has_blocks, const LaunchOptions& options) {
  const AttentionShape& shape = args.shape;
  const bool is_bias_alone = IsBiasAlone(args);
  const bool are_slopes_alone = AreSlopesAlone(args.params.softcap != 0.0f, args.bias != nullptr,
                                               /*wants_dslopes=*/false);
  const auto launch = [&](auto cluster_size) {
    constexpr int kClusterSize = decltype(cluster_size)::value;
    const auto launch =
        is_bias_alone
            ? LaunchForward<ForwardTermsConfig<kHeadDim, Element, true, kClusterSize, Terms::kBias>>
        : are_slopes_alone
            ? LaunchForward<
                  ForwardTermsConfig<kHeadDim, Element, false, kClusterSize, Terms::kSlopes>>
        : has_blocks ? LaunchForward<ForwardTermsConfig<kHeadDim, Element, true, kClusterSize>>
                     : LaunchForward<ForwardTermsConfig<kHeadDim, Element, false, kClusterSize>>;
    return launch(args, options);
  };
  if constexpr (kHeadDim == 128) {
    // As without terms. A block of a bias takes as much bandwidth as a block of keys or values.
    if (PrefersClusters(shape, options)) return launch(std::integral_constant<int, 2>());
  }
  return launch(std::integral_constant<int, 1>());
}

}  // namespace

template <int kHeadDim, int kValueDim, typename Element>
Status ForwardTermsVariant<kHeadDim, kValueDim, Element>::Launch(const ForwardArgs& args,
                                                                 const LaunchOptions& options) {
  const AttentionShape& shape = args.shape;
  const bool has_blocks = args.bias != nullptr && !IsBiasByKey(shape, args.bias_layout);
  if constexpr (kHeadDim > 128) {
    const auto launch =
        has_blocks ? LaunchForward<WideForwardTermsConfig<kHeadDim, kValueDim, Element, true>>
                   : LaunchForward<WideForwardTermsConfig<kHeadDim, kValueDim, Element, false>>;
    return launch(args, options);
  } else {
    return LaunchNarrow<kHeadDim, Element>(args, has_blocks, options);
  }
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling ForwardTermsVariant<kHeadDim, kValueDim, Element>::TilingOf(const AttentionCall& call) {
  // All configurations of a variant have the same tiling.
  if constexpr (kHeadDim > 128) {
    return ConfigTiling<WideForwardTermsConfig<kHeadDim, kValueDim, Element, true>>(call.shape);
  } else {
    return ConfigTiling<ForwardTermsConfig<kHeadDim, Element, true>>(call.shape);
  }
}

template struct ForwardTermsVariant<JAX_MAGI_VARIANT>;

}  // namespace jax_magi::cuda::sm90
