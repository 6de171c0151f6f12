// One variant of the forward kernel for scores with terms; CMakeLists.txt names it.

#include <type_traits>

#include "cc/cuda/attention/sm90/forward_launch.cuh"
#include "cc/cuda/attention/sm90/terms_config.h"

namespace jax_magi::cuda {

template <int kHeadDim, typename Element>
Status ForwardTermsVariant<kHeadDim, Element>::Launch(const ForwardArgs& args,
                                                      const LaunchOptions& options) {
  const AttentionShape& shape = args.shape;
  const bool has_blocks = args.bias != nullptr && !IsBiasByKey(shape, args.bias_layout);
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
    // As without terms. A block of a bias takes as much bandwidth as one of keys or of values.
    if (PrefersClusters(shape, options)) return launch(std::integral_constant<int, 2>());
  }
  return launch(std::integral_constant<int, 1>());
}

template <int kHeadDim, typename Element>
Tiling ForwardTermsVariant<kHeadDim, Element>::TilingOf(const AttentionShape& shape) {
  // The same for both.
  return ConfigTiling<ForwardTermsConfig<kHeadDim, Element, true>>(shape);
}

template struct ForwardTermsVariant<JAX_MAGI_VARIANT>;

}  // namespace jax_magi::cuda
