// Converts a call's bias and slopes to kernel parameters.

#ifndef JAX_MAGI_CUDA_ATTENTION_TERMS_LAUNCH_CUH_
#define JAX_MAGI_CUDA_ATTENTION_TERMS_LAUNCH_CUH_

#include "cc/cuda/attention/score_terms.cuh"
#include "cc/cuda/attention/term_gradients.h"

namespace jax_magi::cuda {

// `args` is a ForwardArgs or BackwardArgs.
template <typename Args>
ScoreTerms TermsOf(const Args& args) {
  const BiasLayout& layout = args.bias_layout;
  const float cap = args.params.softcap;
  const SoftmaxScale scale =
      cap == 0.0f ? SoftmaxScale{kLog2E, 0.0f} : SoftmaxScale{cap * kLog2E, 1.0f / cap};
  ScoreTerms terms{BiasKind::kNone,
                   layout.dtype == DType::kF32,
                   args.bias,
                   layout.batch_stride,
                   layout.head_stride,
                   layout.q_stride,
                   args.alibi_slopes,
                   scale,
                   1.0f / args.params.softmax_scale};
  if (args.bias == nullptr) return terms;
  terms.kind = IsBiasByKey(args.shape, layout)                 ? BiasKind::kByKey
               : IsBiasInTiles(args.shape, layout, args.dtype) ? BiasKind::kTiles
                                                               : BiasKind::kFloat;
  return terms;
}

// Whether a bias in tiles is all that is added to scores, and there is no cap. `args` is a
// ForwardArgs or BackwardArgs.
template <typename Args>
bool IsBiasAlone(const Args& args) {
  return args.bias != nullptr && args.params.softcap == 0.0f && args.alibi_slopes == nullptr &&
         IsBiasInTiles(args.shape, args.bias_layout, args.dtype);
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_TERMS_LAUNCH_CUH_
