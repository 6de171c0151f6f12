// Converts CUDA errors to XLA errors.

#ifndef JAX_MAGI_FFI_CUDA_ERROR_H_
#define JAX_MAGI_FFI_CUDA_ERROR_H_

#include <string>

#include "cc/cuda/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_magi {

inline xla::ffi::Error ToError(const std::string& context, const cuda::Status& status) {
  if (status.ok()) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal(context + ": " + status.message + " (" + status.file + ":" +
                                   std::to_string(status.line) + ")");
}

}  // namespace jax_magi

#endif  // JAX_MAGI_FFI_CUDA_ERROR_H_
