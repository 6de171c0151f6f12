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
JAX_MAGI_DECLARE_HANDLER(jax_magi_cpu_softmax_forward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cpu_softmax_backward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_attention_forward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_attention_backward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_softmax_forward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_softmax_backward);

// A call of a CUDA kernel as it is traced, and what it needs.
struct CudaCall {
  jax_magi::AttentionShape shape;
  jax_magi::DType dtype;
  bool has_softcap, is_backward, deterministic;
};
struct CudaCallNeeds {
  int64_t workspace_bytes = 0;
  int num_splits = 1;         // dk and dv come in so many parts.
  std::vector<int32_t> plan;  // If slices were given.
};

// `slices` are one list that the whole batch shares, or null.
__attribute__((visibility("default"))) CudaCallNeeds
jax_magi_cuda_needs(const CudaCall& call, const jax_magi::Slice* slices);

#endif  // JAX_MAGI_FFI_HANDLERS_H_
