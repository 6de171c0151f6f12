// FFI handlers of the CUDA kernels: decode, check, call.

#include "cc/cuda/forward.h"
#include "cc/ffi/attention_bindings.h"
#include "cc/ffi/attention_checks.h"
#include "cc/ffi/handlers.h"

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

ffi::Error Forward(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::AnyBuffer slices, ffi::AnyBuffer sink, ffi::AnyBuffer plan,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                   ffi::Result<ffi::AnyBuffer> max_logits, ffi::Result<ffi::AnyBuffer> workspace,
                   float softmax_scale, float softcap, int32_t sm_margin) {
  ForwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(
      DecodeForward(q, k, v, slices, sink, *out, *lse, *max_logits, softmax_scale, softcap, &args));
  if (args.shape.head_dim % 8 || args.shape.value_dim % 8) {
    return ffi::Error::InvalidArgument(
        "jax_magi attention forward: head dims must be multiples of 8 on CUDA");
  }
  const bool has_plan = plan.element_count() > 0;
  if (has_plan && !args.shape.shared_slices) {
    return ffi::Error::InvalidArgument("jax_magi attention forward: a plan is for one slice list");
  }
  const cuda::Tiling tiling = cuda::ForwardTiling(args.shape, args.dtype, softcap != 0.0f);
  if (tiling.num_rows > 0 && static_cast<int64_t>(workspace->size_bytes()) <
                                 cuda::ScheduleBytes(args.shape, tiling, has_plan)) {
    return ffi::Error::InvalidArgument("jax_magi attention forward: workspace is too small");
  }
  const cuda::Status status =
      cuda::AttentionForward(args, has_plan ? static_cast<int32_t*>(plan.untyped_data()) : nullptr,
                             workspace->untyped_data(), sm_margin, stream);
  if (status.message == nullptr) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_magi attention forward: ") + status.message + " (" +
                              status.file + ":" + std::to_string(status.line) + ")");
}

}  // namespace
}  // namespace jax_magi

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_attention_forward, jax_magi::Forward,
                              jax_magi::ForwardBinding<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});

int64_t jax_magi_cuda_forward_workspace(const jax_magi::AttentionShape& shape,
                                        jax_magi::DType dtype, bool has_softcap, bool has_plan) {
  const auto tiling = jax_magi::cuda::ForwardTiling(shape, dtype, has_softcap);
  return tiling.num_rows == 0 ? 0 : jax_magi::cuda::ScheduleBytes(shape, tiling, has_plan);
}

std::vector<int32_t> jax_magi_cuda_forward_plan(const jax_magi::AttentionShape& shape,
                                                jax_magi::DType dtype, bool has_softcap,
                                                const jax_magi::Slice* slices) {
  const auto tiling = jax_magi::cuda::ForwardTiling(shape, dtype, has_softcap);
  if (tiling.num_rows == 0) return {};
  return jax_magi::cuda::MakePlan(shape, tiling, slices);
}
