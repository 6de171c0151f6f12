// FFI handlers of the CUDA kernels: decode, check, call.

#include "cc/cuda/kernels.h"
#include "cc/ffi/attention_bindings.h"
#include "cc/ffi/attention_checks.h"
#include "cc/ffi/cuda_error.h"
#include "cc/ffi/handlers.h"

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

const int32_t* PlanOf(const ffi::AnyBuffer& plan) {
  return plan.element_count() > 0 ? static_cast<const int32_t*>(plan.untyped_data()) : nullptr;
}

ffi::Error CheckCuda(const std::string& context, const AttentionShape& shape, bool has_plan,
                     int64_t workspace_bytes, int64_t needed_bytes) {
  if (shape.head_dim % 8 || shape.value_dim % 8) {
    return ffi::Error::InvalidArgument(context + ": head dims must be multiples of 8 on CUDA");
  }
  if (has_plan && !shape.shared_slices) {
    return ffi::Error::InvalidArgument(context + ": a plan is for one slice list");
  }
  if (workspace_bytes < needed_bytes) {
    return ffi::Error::InvalidArgument(context + ": workspace is too small");
  }
  return ffi::Error::Success();
}

ffi::Error Forward(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::AnyBuffer slices, ffi::AnyBuffer sink, ffi::AnyBuffer plan,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                   ffi::Result<ffi::AnyBuffer> max_logits, ffi::Result<ffi::AnyBuffer> workspace,
                   float softmax_scale, float softcap, int32_t sm_margin) {
  const char* context = "jax_magi attention forward";
  ForwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(
      DecodeForward(q, k, v, slices, sink, *out, *lse, *max_logits, softmax_scale, softcap, &args));
  const cuda::LaunchOptions options{PlanOf(plan), workspace->untyped_data(), sm_margin, stream};
  const bool has_plan = options.plan != nullptr;
  JAX_MAGI_RETURN_IF_ERROR(
      CheckCuda(context, args.shape, has_plan, workspace->size_bytes(),
                cuda::ForwardWorkspace(args.shape, args.dtype, softcap != 0.0f, has_plan)));
  return ToError(context, cuda::AttentionForward(args, options));
}

ffi::Error Backward(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::AnyBuffer dout, ffi::AnyBuffer lse, ffi::AnyBuffer delta,
                    ffi::AnyBuffer slices, ffi::AnyBuffer plan, ffi::Result<ffi::AnyBuffer> dq,
                    ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
                    ffi::Result<ffi::AnyBuffer> workspace, float softmax_scale, float softcap,
                    bool deterministic, int32_t sm_margin) {
  const char* context = "jax_magi attention backward";
  BackwardArgs args;
  int num_splits = 1;
  JAX_MAGI_RETURN_IF_ERROR(DecodeBackward(q, k, v, dout, lse, delta, slices, *dq, *dk, *dv,
                                          /*is_dq_summed=*/!deterministic, softmax_scale, softcap,
                                          &args, &num_splits));
  const cuda::LaunchOptions options{PlanOf(plan), workspace->untyped_data(), sm_margin, stream};
  const bool has_plan = options.plan != nullptr;
  JAX_MAGI_RETURN_IF_ERROR(CheckCuda(
      context, args.shape, has_plan, workspace->size_bytes(),
      cuda::BackwardWorkspace(args.shape, args.dtype, softcap != 0.0f, has_plan, deterministic)));
  return ToError(context, cuda::AttentionBackward(args, num_splits, deterministic, options));
}

}  // namespace
}  // namespace jax_magi

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_attention_forward, jax_magi::Forward,
                              jax_magi::ForwardBinding<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_attention_backward, jax_magi::Backward,
                              jax_magi::BackwardBinding<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});

CudaCallNeeds jax_magi_cuda_needs(const CudaCall& call, const jax_magi::Slice* slices) {
  namespace cuda = jax_magi::cuda;
  const bool has_plan = slices != nullptr;
  const cuda::Tiling tiling = call.is_backward
                                  ? cuda::BackwardTiling(call.shape, call.dtype, call.has_softcap)
                                  : cuda::ForwardTiling(call.shape, call.dtype, call.has_softcap);
  CudaCallNeeds needs;
  if (tiling.num_rows == 0) return needs;  // The call will say that it was not built.
  if (call.is_backward) {
    needs.num_splits = cuda::BackwardSplits(call.shape, call.dtype, call.has_softcap);
    needs.workspace_bytes = cuda::BackwardWorkspace(call.shape, call.dtype, call.has_softcap,
                                                    has_plan, call.deterministic);
  } else {
    needs.workspace_bytes =
        cuda::ForwardWorkspace(call.shape, call.dtype, call.has_softcap, has_plan);
  }
  if (has_plan) needs.plan = cuda::MakePlan(call.shape, tiling, slices);
  return needs;
}
