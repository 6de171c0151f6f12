// The symbols that the native libraries export: one FFI handler per op and device.

#ifndef JAX_MAGI_FFI_HANDLERS_H_
#define JAX_MAGI_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

#define JAX_MAGI_DECLARE_HANDLER(name) \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame)

JAX_MAGI_DECLARE_HANDLER(jax_magi_cpu_attention_forward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cpu_attention_backward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_attention_forward);

#endif  // JAX_MAGI_FFI_HANDLERS_H_
