// FFI handlers of operations that help computation and communication to overlap: decode, check,
// call.

#include <string>

#include "cc/cuda/overlap/overlap.h"
#include "cc/ffi/cuda_error.h"
#include "cc/ffi/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

ffi::Error KernelBarrier(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                         ffi::Result<ffi::AnyBuffer> workspace) {
  const std::string context = "jax_magi kernel barrier";
  if (x.size_bytes() != y->size_bytes()) {
    return ffi::Error::InvalidArgument(context + ": the result must be as large as the operand");
  }
  if (static_cast<int64_t>(workspace->size_bytes()) < cuda::KernelBarrierWorkspace()) {
    return ffi::Error::InvalidArgument(context + ": workspace is too small");
  }
  if (x.untyped_data() != y->untyped_data()) {
    const cudaError_t code = cudaMemcpyAsync(y->untyped_data(), x.untyped_data(), x.size_bytes(),
                                             cudaMemcpyDeviceToDevice, stream);
    if (code != cudaSuccess) return ffi::Error::Internal(context + ": " + cudaGetErrorString(code));
  }
  return ToError(context, cuda::KernelBarrier(workspace->untyped_data(), stream));
}

ffi::Error StartStandIn(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                        int32_t num_sms, int32_t num_rounds, int32_t cluster_size,
                        int32_t delay_us) {
  const std::string context = "jax_magi stand-in communication";
  if (x.size_bytes() != y->size_bytes() || x.size_bytes() % 16 != 0) {
    return ffi::Error::InvalidArgument(
        context + ": operand and result must be equally large, and a multiple of 16 bytes");
  }
  if (num_sms < 1 || num_rounds < 0 || cluster_size < 1 || num_sms % cluster_size != 0) {
    return ffi::Error::InvalidArgument(
        context + ": num_sms must be positive, and a multiple of cluster_size");
  }
  const cuda::StandIn stand_in{
      x.untyped_data(), y->untyped_data(), static_cast<int64_t>(x.size_bytes()),
      num_sms,          num_rounds,        cluster_size,
      delay_us};
  return ToError(context, cuda::StartStandIn(stand_in, stream));
}

// The stand-in reads and writes the operands until this point.
ffi::Error WaitForStandIn(cudaStream_t stream, ffi::AnyBuffer, ffi::AnyBuffer y,
                          ffi::Result<ffi::AnyBuffer> result) {
  const std::string context = "jax_magi stand-in communication";
  if (y.untyped_data() != result->untyped_data()) {
    return ffi::Error::InvalidArgument(context + ": the result must take its operand's memory");
  }
  return ToError(context, cuda::WaitForStandIn(stream));
}

}  // namespace
}  // namespace jax_magi

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_kernel_barrier, jax_magi::KernelBarrier,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()   // x
                                  .Ret<ffi::AnyBuffer>()   // x, unchanged
                                  .Ret<ffi::AnyBuffer>(),  // workspace
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_stand_in_start, jax_magi::StartStandIn,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Ret<ffi::AnyBuffer>()  // the copy of x, in progress
                                  .Attr<int32_t>("num_sms")
                                  .Attr<int32_t>("num_rounds")
                                  .Attr<int32_t>("cluster_size")
                                  .Attr<int32_t>("delay_us"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_stand_in_done, jax_magi::WaitForStandIn,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()    // x
                                  .Arg<ffi::AnyBuffer>()    // the result of the start
                                  .Ret<ffi::AnyBuffer>());  // the copy of x, complete
