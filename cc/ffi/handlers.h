// The symbols that the native libraries export: one FFI handler per op and device, the needs of an
// attention call when Python traces it, and the kernels that were built.

#ifndef JAX_MAGI_FFI_HANDLERS_H_
#define JAX_MAGI_FFI_HANDLERS_H_

#include <cstdint>
#include <map>
#include <string>
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
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_attention_finish_dq);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_attention_tile_list);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_attention_tile_lists);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_softmax_forward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_softmax_backward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_kernel_barrier);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_stand_in_start);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_stand_in_done);

// `slices` is one list that the whole batch shares, or null.
#define JAX_MAGI_DECLARE_NEEDS(name)                                    \
  __attribute__((visibility("default"))) jax_magi::AttentionNeeds name( \
      const jax_magi::AttentionCall& call, const jax_magi::Slice* slices)

JAX_MAGI_DECLARE_NEEDS(jax_magi_cpu_attention_needs);
JAX_MAGI_DECLARE_NEEDS(jax_magi_cuda_attention_needs);

// Readable lists of what was built, by kind.
#define JAX_MAGI_DECLARE_VARIANTS(name) \
  __attribute__((visibility("default"))) std::map<std::string, std::vector<std::string>> name()

JAX_MAGI_DECLARE_VARIANTS(jax_magi_cpu_variants);
JAX_MAGI_DECLARE_VARIANTS(jax_magi_cuda_variants);

// The fields of a tile list's stamp, by name; and the part of a stamp that encodes a number of
// blocks.
__attribute__((visibility("default"))) std::map<std::string, int64_t> jax_magi_cuda_read_tile_stamp(
    int32_t stamp);
__attribute__((visibility("default"))) int32_t jax_magi_cuda_stamp_of_blocks(int64_t num_blocks);

#endif  // JAX_MAGI_FFI_HANDLERS_H_
