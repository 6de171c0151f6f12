// Operands, results and attributes of the attention ops, in order. They are the same on every
// device; only the context differs. cc/attention.h defines them.

#ifndef JAX_MAGI_FFI_ATTENTION_BINDINGS_H_
#define JAX_MAGI_FFI_ATTENTION_BINDINGS_H_

#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace jax_magi {

template <typename Context>
auto ForwardBinding() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()  // q
      .template Arg<ffi::AnyBuffer>()  // k
      .template Arg<ffi::AnyBuffer>()  // v
      .template Arg<ffi::AnyBuffer>()  // slices
      .template Arg<ffi::AnyBuffer>()  // sink
      .template Arg<ffi::AnyBuffer>()  // bias; without elements: none
      .template Arg<ffi::AnyBuffer>()  // alibi_slopes; without elements: none
      .template Arg<ffi::AnyBuffer>()  // tile_list, see AttentionNeeds; without elements: none
      .RemainingArgs()                 // out, lse and max_logits to merge with, or nothing
      .template Ret<ffi::AnyBuffer>()  // out
      .template Ret<ffi::AnyBuffer>()  // lse
      .template Ret<ffi::AnyBuffer>()  // max_logits
      .template Ret<ffi::AnyBuffer>()  // workspace
      .template Attr<float>("softmax_scale")
      .template Attr<float>("softcap")
      .template Attr<int32_t>("sm_margin")
      .template Attr<int32_t>("tile_stamp")
      .template Attr<std::string_view>("architecture")
      .template Attr<int32_t>("shared_memory_bytes");
}

template <typename Context>
auto BackwardBinding() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()  // q
      .template Arg<ffi::AnyBuffer>()  // k
      .template Arg<ffi::AnyBuffer>()  // v
      .template Arg<ffi::AnyBuffer>()  // dout
      .template Arg<ffi::AnyBuffer>()  // lse
      .template Arg<ffi::AnyBuffer>()  // delta
      .template Arg<ffi::AnyBuffer>()  // slices
      .template Arg<ffi::AnyBuffer>()  // bias
      .template Arg<ffi::AnyBuffer>()  // alibi_slopes
      .template Arg<ffi::AnyBuffer>()  // tile_list
      .RemainingArgs()                 // a sum of dq to add to, or nothing
      .template Ret<ffi::AnyBuffer>()  // dq, or the sum of dq
      .template Ret<ffi::AnyBuffer>()  // dk
      .template Ret<ffi::AnyBuffer>()  // dv
      .template Ret<ffi::AnyBuffer>()  // dbias; without elements: not requested
      .template Ret<ffi::AnyBuffer>()  // dslopes; without elements: not requested
      .template Ret<ffi::AnyBuffer>()  // workspace
      .template Attr<float>("softmax_scale")
      .template Attr<float>("softcap")
      .template Attr<bool>("deterministic")
      .template Attr<int32_t>("sm_margin")
      .template Attr<int32_t>("tile_stamp")
      .template Attr<std::string_view>("architecture")
      .template Attr<int32_t>("shared_memory_bytes")
      .template Attr<int32_t>("num_dkv_parts");
}

}  // namespace jax_magi

#endif  // JAX_MAGI_FFI_ATTENTION_BINDINGS_H_
