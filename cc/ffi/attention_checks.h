// Decoding shared by every device's attention handlers: operands to a checked AttentionShape.
//
// Python has checked what a user can get wrong. Here stands only what could corrupt memory.

#ifndef JAX_MAGI_FFI_ATTENTION_CHECKS_H_
#define JAX_MAGI_FFI_ATTENTION_CHECKS_H_

#include <initializer_list>
#include <string>

#include "cc/attention.h"
#include "xla/ffi/api/ffi.h"

namespace jax_magi {

// An operand or result, with the name that errors use.
struct NamedBuffer {
  const char* name;
  xla::ffi::AnyBuffer buffer;
};

// `context` is the op's name. Each returns an error that names op and operand.
xla::ffi::Error CheckDims(const char* context, const NamedBuffer& named,
                          std::initializer_list<int64_t> expected);
xla::ffi::Error CheckDType(const char* context, const NamedBuffer& named,
                           std::initializer_list<xla::ffi::DataType> allowed);

// Fills `args` of a forward call, and checks all of it.
xla::ffi::Error DecodeForward(xla::ffi::AnyBuffer q, xla::ffi::AnyBuffer k, xla::ffi::AnyBuffer v,
                              xla::ffi::AnyBuffer slices, xla::ffi::AnyBuffer sink,
                              xla::ffi::AnyBuffer out, xla::ffi::AnyBuffer lse,
                              xla::ffi::AnyBuffer max_logits, float softmax_scale, float softcap,
                              ForwardArgs* args);

// Fills `shape` from q, k, v and slices, and `dtype` from q.
xla::ffi::Error DecodeAttention(const char* context, xla::ffi::AnyBuffer q, xla::ffi::AnyBuffer k,
                                xla::ffi::AnyBuffer v, xla::ffi::AnyBuffer slices,
                                AttentionShape* shape, DType* dtype);

DType ToDType(xla::ffi::DataType type);

// Where `num_splits` is not null, dk and dv may have several times the batch: how many is returned.
xla::ffi::Error DecodeBackward(xla::ffi::AnyBuffer q, xla::ffi::AnyBuffer k, xla::ffi::AnyBuffer v,
                               xla::ffi::AnyBuffer dout, xla::ffi::AnyBuffer lse,
                               xla::ffi::AnyBuffer delta, xla::ffi::AnyBuffer slices,
                               xla::ffi::AnyBuffer dq, xla::ffi::AnyBuffer dk,
                               xla::ffi::AnyBuffer dv, float softmax_scale, float softcap,
                               BackwardArgs* args, int* num_splits);

}  // namespace jax_magi

#define JAX_MAGI_RETURN_IF_ERROR(expression) \
  if (xla::ffi::Error error = (expression); error.failure()) return error

#endif  // JAX_MAGI_FFI_ATTENTION_CHECKS_H_
