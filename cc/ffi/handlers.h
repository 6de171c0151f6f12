// The symbols that the native libraries export: one FFI handler per op and device, what a device
// answers when Python traces a call of attention, and what its kernels were built for.

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
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_softmax_forward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_softmax_backward);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_kernel_barrier);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_stand_in_start);
JAX_MAGI_DECLARE_HANDLER(jax_magi_cuda_stand_in_done);

// `slices` are one list that the whole batch shares, or null.
#define JAX_MAGI_DECLARE_NEEDS(name)                                    \
  __attribute__((visibility("default"))) jax_magi::AttentionNeeds name( \
      const jax_magi::AttentionCall& call, const jax_magi::Slice* slices)

JAX_MAGI_DECLARE_NEEDS(jax_magi_cpu_attention_needs);
JAX_MAGI_DECLARE_NEEDS(jax_magi_cuda_attention_needs);

// Lists of words for people, by what they are lists of.
#define JAX_MAGI_DECLARE_VARIANTS(name) \
  __attribute__((visibility("default"))) std::map<std::string, std::vector<std::string>> name()

JAX_MAGI_DECLARE_VARIANTS(jax_magi_cpu_variants);
JAX_MAGI_DECLARE_VARIANTS(jax_magi_cuda_variants);

// What the stamp of a tile list says, by name; and a stamp's share that says how many blocks its
// tiles have.
__attribute__((visibility("default"))) std::map<std::string, int64_t> jax_magi_cuda_read_tile_stamp(
    int32_t stamp);
__attribute__((visibility("default"))) int32_t jax_magi_cuda_stamp_of_blocks(int64_t num_blocks);

#endif  // JAX_MAGI_FFI_HANDLERS_H_
