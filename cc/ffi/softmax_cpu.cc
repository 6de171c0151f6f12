// FFI handlers of the CPU softmax: decode, check, call.

#include "cc/cpu/softmax.h"
#include "cc/ffi/handlers.h"
#include "cc/ffi/softmax_bindings.h"
#include "cc/ffi/softmax_checks.h"
#include "cc/ffi/thread_pool.h"

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

ffi::Error Forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                   ffi::AnyBuffer offset, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> offset_probability, float scale, int32_t lo,
                   int32_t hi) {
  SoftmaxForwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(
      DecodeSoftmaxForward(x, mask, offset, *y, *offset_probability, scale, lo, hi, &args));
  return Finish(kSoftmaxForward, cpu::SoftmaxForward(args, OnPool(pool)));
}

ffi::Error Backward(ffi::ThreadPool pool, ffi::AnyBuffer y, ffi::AnyBuffer dy,
                    ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dot, float scale,
                    int32_t lo, int32_t hi) {
  SoftmaxBackwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(DecodeSoftmaxBackward(y, dy, *dx, *dot, scale, lo, hi, &args));
  return Finish(kSoftmaxBackward, cpu::SoftmaxBackward(args, OnPool(pool)));
}

}  // namespace
}  // namespace jax_magi

// At global scope: inside the namespace, gcc would not give them the visibility of handlers.h.
namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cpu_softmax_forward, jax_magi::Forward,
                              jax_magi::SoftmaxForwardBinding<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cpu_softmax_backward, jax_magi::Backward,
                              jax_magi::SoftmaxBackwardBinding<ffi::ThreadPool>());
