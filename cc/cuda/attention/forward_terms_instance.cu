// One variant of the forward kernel for scores with terms; CMakeLists.txt names it.

#include "cc/cuda/attention/forward_launch.cuh"
#include "cc/cuda/attention/terms_config.h"

namespace jax_magi::cuda {

template <int kHeadDim, typename Element>
Status ForwardTermsVariant<kHeadDim, Element>::Launch(const ForwardArgs& args,
                                                      const LaunchOptions& options) {
  const AttentionShape& shape = args.shape;
  const bool has_blocks = args.bias != nullptr && !IsBiasByKey(shape, args.bias_layout);
  if constexpr (kHeadDim == 128) {
    // As without terms. A block of a bias takes as much bandwidth as one of keys or of values.
    const bool has_pairs = shape.num_kv_heads > 0 && shape.group() % 2 == 0;
    if (options.has_long_tiles && has_pairs) {
      const auto launch = has_blocks
                              ? LaunchForward<ForwardTermsConfig<kHeadDim, Element, true, 2>>
                              : LaunchForward<ForwardTermsConfig<kHeadDim, Element, false, 2>>;
      return launch(args, options);
    }
  }
  const auto launch = has_blocks ? LaunchForward<ForwardTermsConfig<kHeadDim, Element, true>>
                                 : LaunchForward<ForwardTermsConfig<kHeadDim, Element, false>>;
  return launch(args, options);
}

template <int kHeadDim, typename Element>
Tiling ForwardTermsVariant<kHeadDim, Element>::TilingOf(const AttentionShape& shape) {
  // The same for both.
  return ConfigTiling<ForwardTermsConfig<kHeadDim, Element, true>>(shape);
}

template struct ForwardTermsVariant<JAX_MAGI_VARIANT>;

}  // namespace jax_magi::cuda
