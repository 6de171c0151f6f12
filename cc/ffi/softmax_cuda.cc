// FFI handlers of the CUDA softmax: decode, check, call.

#include <limits>

#include "cc/cuda/softmax/softmax.h"
#include "cc/ffi/cuda_error.h"
#include "cc/ffi/handlers.h"
#include "cc/ffi/softmax_bindings.h"
#include "cc/ffi/softmax_checks.h"

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

ffi::Error CheckCuda(const char* context, const SoftmaxShape& shape,
                     std::initializer_list<NamedBuffer> arrays) {
  if (shape.num_rows() > std::numeric_limits<int32_t>::max()) {
    return ffi::Error::InvalidArgument(std::string(context) + ": must have fewer than 2**31 rows");
  }
  return CheckAligned(context, arrays);
}

ffi::Error Forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                   ffi::AnyBuffer offset, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> offset_probability, float scale, int32_t lo,
                   int32_t hi) {
  SoftmaxForwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(
      DecodeSoftmaxForward(x, mask, offset, *y, *offset_probability, scale, lo, hi, &args));
  JAX_MAGI_RETURN_IF_ERROR(
      CheckCuda(kSoftmaxForward, args.shape, {{"x", x}, {"mask", mask}, {"y", *y}}));
  return ToError(kSoftmaxForward, cuda::SoftmaxForward(args, stream));
}

ffi::Error Backward(cudaStream_t stream, ffi::AnyBuffer y, ffi::AnyBuffer dy,
                    ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dot, float scale,
                    int32_t lo, int32_t hi) {
  SoftmaxBackwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(DecodeSoftmaxBackward(y, dy, *dx, *dot, scale, lo, hi, &args));
  JAX_MAGI_RETURN_IF_ERROR(
      CheckCuda(kSoftmaxBackward, args.shape, {{"y", y}, {"dy", dy}, {"dx", *dx}}));
  return ToError(kSoftmaxBackward, cuda::SoftmaxBackward(args, stream));
}

}  // namespace
}  // namespace jax_magi

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_softmax_forward, jax_magi::Forward,
                              jax_magi::SoftmaxForwardBinding<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cuda_softmax_backward, jax_magi::Backward,
                              jax_magi::SoftmaxBackwardBinding<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});
