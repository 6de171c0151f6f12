// The variants of the attention kernels, one for each architecture, pair of head dims and element
// type that was built.

#ifndef JAX_MAGI_CUDA_ATTENTION_VARIANT_H_
#define JAX_MAGI_CUDA_ATTENTION_VARIANT_H_

#include <vector>

#include "cc/attention.h"
#include "cc/cuda/attention/attention.h"
#include "cc/cuda/attention/element.h"

namespace jax_magi::cuda {

struct ForwardKernels {
  Status (*launch)(const ForwardArgs& args, const LaunchOptions& options);
  Tiling (*tiling)(const AttentionCall& call);
};

struct BackwardKernels {
  Status (*launch)(const BackwardArgs& args, int num_parts, bool deterministic,
                   const LaunchOptions& options);
  Tiling (*tiling)(const AttentionCall& call);
  // The tiling of calls that run in clusters, which equals the one above if the call never does.
  // Null: none do.
  Tiling (*cluster_tiling)(const AttentionCall& call) = nullptr;
  bool cuts_heads = false;  // Whether the kernels support head_cuts.h.
};

struct Variant {
  Architecture architecture;
  // Of the kernels, and of the arrays in their workspace. Those of a call may be smaller.
  int head_dim, value_dim;
  DType dtype;
  // The variants with terms support a bias and slopes, with a cap and without.
  ForwardKernels forward, forward_terms;
  BackwardKernels backward, backward_terms;
};

// The tables of the architectures. Each has a folder that defines its own.
const std::vector<Variant>& Sm90Variants();
const std::vector<Variant>& Sm80Variants();

template <typename Element>
constexpr DType kDTypeOf = DType::kF32;
template <>
constexpr DType kDTypeOf<bfloat16_t> = DType::kBF16;
template <>
constexpr DType kDTypeOf<half_t> = DType::kF16;

// A row of an architecture's table. The types are the launchers in the architecture's variants.h.
template <typename Element, typename Forward, typename ForwardTerms, typename Backward,
          typename BackwardTerms>
Variant MakeVariant(Architecture architecture, int head_dim, int value_dim) {
  return {architecture,
          head_dim,
          value_dim,
          kDTypeOf<Element>,
          {Forward::Launch, Forward::TilingOf},
          {ForwardTerms::Launch, ForwardTerms::TilingOf},
          {Backward::Launch, Backward::TilingOf},
          {BackwardTerms::Launch, BackwardTerms::TilingOf}};
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_VARIANT_H_
