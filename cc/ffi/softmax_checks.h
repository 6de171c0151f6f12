// Decoding shared by every device's softmax handlers.
//
// Python has checked what a user can get wrong. This file checks only what could corrupt memory.

#ifndef JAX_MAGI_FFI_SOFTMAX_CHECKS_H_
#define JAX_MAGI_FFI_SOFTMAX_CHECKS_H_

#include "cc/ffi/checks.h"
#include "cc/softmax.h"

namespace jax_magi {

constexpr const char* kSoftmaxForward = "jax_magi softmax forward";
constexpr const char* kSoftmaxBackward = "jax_magi softmax backward";

xla::ffi::Error DecodeSoftmaxForward(xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer mask,
                                     xla::ffi::AnyBuffer offset, xla::ffi::AnyBuffer y,
                                     xla::ffi::AnyBuffer offset_probability, float scale,
                                     int32_t lo, int32_t hi, SoftmaxForwardArgs* args);

xla::ffi::Error DecodeSoftmaxBackward(xla::ffi::AnyBuffer y, xla::ffi::AnyBuffer dy,
                                      xla::ffi::AnyBuffer dx, xla::ffi::AnyBuffer dot, float scale,
                                      int32_t lo, int32_t hi, SoftmaxBackwardArgs* args);

}  // namespace jax_magi

#endif  // JAX_MAGI_FFI_SOFTMAX_CHECKS_H_
