// FFI handlers of the CUDA kernels: decode, check, call.

#include "cc/cuda/forward.h"
#include "cc/ffi/attention_bindings.h"
#include "cc/ffi/attention_checks.h"
#include "cc/ffi/handlers.h"

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

ffi::Error Forward(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::AnyBuffer slices, ffi::AnyBuffer sink, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> max_logits,
                   ffi::Result<ffi::AnyBuffer> workspace, float softmax_scale, float softcap,
                   int32_t sm_margin) {
  ForwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(
      DecodeForward(q, k, v, slices, sink, *out, *lse, *max_logits, softmax_scale, softcap, &args));
  if (args.shape.head_dim % 8 || args.shape.value_dim % 8) {
    return ffi::Error::InvalidArgument(
        "jax_magi attention forward: head dims must be multiples of 8 on CUDA");
  }
  if (static_cast<int64_t>(workspace->size_bytes()) < cuda::ForwardWorkspace(args.shape)) {
    return ffi::Error::InvalidArgument("jax_magi attention forward: workspace is too small");
  }
  const cuda::Status status =
      cuda::AttentionForward(args, workspace->untyped_data(), sm_margin, stream);
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
