// One variant of the backward kernel for scores with terms; CMakeLists.txt names it.

#include <type_traits>

#include "cc/cuda/attention/sm90/backward_launch.cuh"
#include "cc/cuda/attention/sm90/terms_config.h"

namespace jax_magi::cuda::sm90 {
namespace {

// The configuration of a variant. Beyond 128 dims, one serves all terms.
template <int kHeadDim, int kValueDim, typename Element, Terms kTerms>
using ConfigFor =
    std::conditional_t<(kHeadDim > 128), WideBackwardTermsConfig<kHeadDim, kValueDim, Element>,
                       BackwardTermsConfig<kHeadDim, Element, kTerms>>;

}  // namespace

template <int kHeadDim, int kValueDim, typename Element>
Status BackwardTermsVariant<kHeadDim, kValueDim, Element>::Launch(const BackwardArgs& whole,
                                                                  int num_parts, bool deterministic,
                                                                  const LaunchOptions& options) {
  const AttentionShape& shape = whole.shape;
  if (shape.batch == 0) return {};
  constexpr bool kIsWide = kHeadDim > 128;
  const AttentionCall call = CallOf(whole, deterministic, options.target);
  const Tiling tiling = TilingOf(call);
  const BackwardWorkspace workspace =
      BackwardWorkspaceOf(call, tiling, kHeadDim, num_parts, options.workspace);
  JAX_MAGI_RETURN_IF_BAD(CheckFits(workspace, options.workspace_bytes));
  const BackwardArgs args = WithParts(whole, workspace.parts);

  TermGradients gradients;
  const bool is_bias_alone =
      !kIsWide && IsBiasAlone(args) &&
      (args.dbias == nullptr || !IsDbiasSummed(shape, args.bias_layout, args.dtype));
  const bool are_slopes_alone = AreSlopesAlone(call.has_softcap, call.has_bias, call.wants_dslopes);
  JAX_MAGI_CUDA_RETURN_IF_ERROR(PrepareTermGradients(
      args, workspace.term_sums, /*can_zero_hidden=*/is_bias_alone, options.stream, &gradients));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(PrepareBackward(args, CheckOf(shape, tiling, options),
                                                workspace.zeros, /*added=*/{}, workspace.statistics,
                                                workspace.counter, options.stream));
  if (shape.k_len > 0) {
    auto launch = LaunchBackwardKernel<ConfigFor<kHeadDim, kValueDim, Element, Terms::kAny>>;
    if (is_bias_alone) {
      launch = LaunchBackwardKernel<ConfigFor<kHeadDim, kValueDim, Element, Terms::kBias>>;
    } else if (are_slopes_alone) {
      launch = LaunchBackwardKernel<ConfigFor<kHeadDim, kValueDim, Element, Terms::kSlopes>>;
    }
    JAX_MAGI_RETURN_IF_BAD(launch(args, workspace, options, gradients));
  }
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      FinishBackward(whole, workspace.sum, workspace.parts, options.stream));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(FinishTermGradients(args, gradients, options.stream));
  return {};
}

template <int kHeadDim, int kValueDim, typename Element>
Tiling BackwardTermsVariant<kHeadDim, kValueDim, Element>::TilingOf(const AttentionCall& call) {
  return AreSlopesAlone(call.has_softcap, call.has_bias, call.wants_dslopes)
             ? kBackwardTiling<ConfigFor<kHeadDim, kValueDim, Element, Terms::kSlopes>>
             : kBackwardTiling<ConfigFor<kHeadDim, kValueDim, Element, Terms::kAny>>;
}

template struct BackwardTermsVariant<JAX_MAGI_VARIANT>;

}  // namespace jax_magi::cuda::sm90
