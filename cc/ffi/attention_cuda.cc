// FFI handlers of the CUDA kernels: decode, check, call.

#include "cc/cuda/forward.h"
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
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<ffi::AnyBuffer>()  // slices
                                  .Arg<ffi::AnyBuffer>()  // sink
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // lse
                                  .Ret<ffi::AnyBuffer>()  // max_logits
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attr<float>("softmax_scale")
                                  .Attr<float>("softcap")
                                  .Attr<int32_t>("sm_margin"),
                              {ffi::Traits::kCmdBufferCompatible});
