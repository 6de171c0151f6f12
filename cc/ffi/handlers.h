// The symbols that the native libraries export: one FFI handler per op and device, and what Python
// asks of the CUDA kernels when it traces a call.

#ifndef JAX_MAGI_FFI_HANDLERS_H_
#define JAX_MAGI_FFI_HANDLERS_H_

#include <vector>

#include "cc/attention.h"
#include "xla/ffi/api/c_api.h"

#define JAX_MAGI_DECLARE_HANDLER(name) \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame)

JAX_MAGI_DECLARE_HANDLER(jax_magi_cpu_attention_forward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cpu_attention_backward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_attention_forward);

// The exported names; there is one of each.
#pragma GCC visibility push(default)

// Bytes of workspace of a call.
int64_t jax_magi_cuda_forward_workspace(const jax_magi::AttentionShape& shape,
                                        jax_magi::DType dtype, bool has_softcap, bool has_plan);
// The plan of a call whose batch shares these slices.
std::vector<int32_t> jax_magi_cuda_forward_plan(const jax_magi::AttentionShape& shape,
                                                jax_magi::DType dtype, bool has_softcap,
                                                const jax_magi::Slice* slices);

#pragma GCC visibility pop

#endif  // JAX_MAGI_FFI_HANDLERS_H_
