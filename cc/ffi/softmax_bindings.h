// Operands, results and attributes of the softmax ops, in order. They are the same on every device;
// only the context differs.

#ifndef JAX_MAGI_FFI_SOFTMAX_BINDINGS_H_
#define JAX_MAGI_FFI_SOFTMAX_BINDINGS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_magi {

template <typename Context>
auto SoftmaxForwardBinding() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()  // x
      .template Arg<ffi::AnyBuffer>()  // mask; without elements: none
      .template Arg<ffi::AnyBuffer>()  // offset; without elements: none
      .template Ret<ffi::AnyBuffer>()  // y
      .template Ret<ffi::AnyBuffer>()  // offset_probability; without elements if there is no offset
      .template Attr<float>("scale")
      .template Attr<int32_t>("lo")
      .template Attr<int32_t>("hi");
}

template <typename Context>
auto SoftmaxBackwardBinding() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()  // y
      .template Arg<ffi::AnyBuffer>()  // dy
      .template Ret<ffi::AnyBuffer>()  // dx
      .template Ret<ffi::AnyBuffer>()  // dot; without elements: not requested
      .template Attr<float>("scale")
      .template Attr<int32_t>("lo")
      .template Attr<int32_t>("hi");
}

}  // namespace jax_magi

#endif  // JAX_MAGI_FFI_SOFTMAX_BINDINGS_H_
