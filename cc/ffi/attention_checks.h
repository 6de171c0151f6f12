// Decoding shared by every device's attention handlers: operands to a checked AttentionShape.
//
// Python has checked what a user can get wrong. This file checks only what could corrupt memory.

#ifndef JAX_MAGI_FFI_ATTENTION_CHECKS_H_
#define JAX_MAGI_FFI_ATTENTION_CHECKS_H_

#include "cc/attention.h"
#include "cc/ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace jax_magi {

// Fills `args` of a forward call, and checks all of it. `running` holds out, lse and max_logits of
// earlier calls, in the memory of the results, or nothing.
xla::ffi::Error DecodeForward(xla::ffi::AnyBuffer q, xla::ffi::AnyBuffer k, xla::ffi::AnyBuffer v,
                              xla::ffi::AnyBuffer slices, xla::ffi::AnyBuffer sink,
                              xla::ffi::AnyBuffer bias, xla::ffi::AnyBuffer alibi_slopes,
                              xla::ffi::RemainingArgs running, xla::ffi::AnyBuffer out,
                              xla::ffi::AnyBuffer lse, xla::ffi::AnyBuffer max_logits,
                              float softmax_scale, float softcap, ForwardArgs* args);

// Checks that these are lists of slices, of any length.
xla::ffi::Error CheckSlices(const char* context, xla::ffi::AnyBuffer slices);

// Fills `shape` from q, k, v and slices, and `dtype` from q.
xla::ffi::Error DecodeAttention(const char* context, xla::ffi::AnyBuffer q, xla::ffi::AnyBuffer k,
                                xla::ffi::AnyBuffer v, xla::ffi::AnyBuffer slices,
                                AttentionShape* shape, DType* dtype);

// Gradients are all float32 or all of q's type, except that dq is float32 if it is accumulated in
// memory. `running` holds a sum of dq over several calls, in the memory of dq, or nothing.
xla::ffi::Error DecodeBackward(xla::ffi::AnyBuffer q, xla::ffi::AnyBuffer k, xla::ffi::AnyBuffer v,
                               xla::ffi::AnyBuffer dout, xla::ffi::AnyBuffer lse,
                               xla::ffi::AnyBuffer delta, xla::ffi::AnyBuffer slices,
                               xla::ffi::AnyBuffer bias, xla::ffi::AnyBuffer alibi_slopes,
                               xla::ffi::RemainingArgs running, xla::ffi::AnyBuffer dq,
                               xla::ffi::AnyBuffer dk, xla::ffi::AnyBuffer dv,
                               xla::ffi::AnyBuffer dbias, xla::ffi::AnyBuffer dslopes,
                               bool is_dq_summed, float softmax_scale, float softcap,
                               BackwardArgs* args);

}  // namespace jax_magi

#endif  // JAX_MAGI_FFI_ATTENTION_CHECKS_H_
