// One variant of the backward kernel for scores with terms; CMakeLists.txt names it.

#include "cc/cuda/attention/backward_launch.cuh"
#include "cc/cuda/attention/terms_config.h"

namespace jax_magi::cuda {

// Where the result must be the same bit for bit, the kernel runs for all but dq, and then for dq
// alone.
template <int kHeadDim, typename Element>
Status BackwardTermsVariant<kHeadDim, Element>::Launch(const BackwardArgs& call, int num_parts,
                                                       bool deterministic,
                                                       const LaunchOptions& options) {
  const AttentionShape& shape = call.shape;
  if (shape.batch == 0) return {};
  using All = BackwardTermsConfig<kHeadDim, Element, BackwardPart::kAll>;
  using Queries = BackwardTermsConfig<kHeadDim, Element, BackwardPart::kQueries>;

  // The rest of the workspace: the counter and list of each run, and sums of the terms' gradients.
  auto [args, sum, parts, statistics, first] =
      SplitWorkspace(call, deterministic ? 0 : kHeadDim / 64, num_parts, options);
  LaunchOptions second = first;
  char* sums = static_cast<char*>(first.workspace) + sizeof(WorkCounter);
  if (deterministic) {
    second.workspace = static_cast<char*>(first.workspace) + WorkBytes(shape, kBackwardTiling<All>);
    sums = static_cast<char*>(second.workspace) + WorkBytes(shape, kBackwardTiling<Queries>);
  }

  TermGradients gradients;
  const bool is_bias_alone =
      IsBiasAlone(args) &&
      (args.dbias == nullptr || !IsDbiasSummed(shape, args.bias_layout, args.dtype));
  const bool are_slopes_alone =
      AreSlopesAlone(args.params.softcap != 0.0f, args.bias != nullptr, args.dslopes != nullptr);
  JAX_MAGI_CUDA_RETURN_IF_ERROR(PrepareTermGradients(args, sums, /*can_zero_hidden=*/is_bias_alone,
                                                     options.stream, &gradients));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(PrepareBackward(
      args, kLog2E, sum, statistics, static_cast<WorkCounter*>(first.workspace), options.stream));
  if (shape.k_len > 0) {
    auto launch = LaunchBackwardPart<All>;
    if (is_bias_alone) {
      launch = LaunchBackwardPart<
          BackwardTermsConfig<kHeadDim, Element, BackwardPart::kAll, Terms::kBias>>;
    } else if (are_slopes_alone) {
      launch = LaunchBackwardPart<
          BackwardTermsConfig<kHeadDim, Element, BackwardPart::kAll, Terms::kSlopes>>;
    }
    JAX_MAGI_RETURN_IF_BAD(launch(args, num_parts, statistics, sum.data, first, gradients,
                                  /*adds_dq=*/!deterministic));
  }
  if (deterministic && shape.q_len > 0) {
    JAX_MAGI_RETURN_IF_BAD(
        LaunchBackwardPart<Queries>(args, /*num_parts=*/1, statistics, nullptr, second));
  }
  JAX_MAGI_CUDA_RETURN_IF_ERROR(FinishBackward(call, sum, parts, options.stream));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(FinishTermGradients(args, gradients, options.stream));
  return {};
}

template <int kHeadDim, typename Element>
Tiling BackwardTermsVariant<kHeadDim, Element>::TilingOf(BackwardPart part, bool are_slopes_alone) {
  if (part == BackwardPart::kQueries) {
    return kBackwardTiling<BackwardTermsConfig<kHeadDim, Element, BackwardPart::kQueries>>;
  }
  using Slopes = BackwardTermsConfig<kHeadDim, Element, BackwardPart::kAll, Terms::kSlopes>;
  return are_slopes_alone
             ? kBackwardTiling<Slopes>
             : kBackwardTiling<BackwardTermsConfig<kHeadDim, Element, BackwardPart::kAll>>;
}

template struct BackwardTermsVariant<JAX_MAGI_VARIANT>;

}  // namespace jax_magi::cuda
