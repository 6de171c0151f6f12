// Checks of operands and results that all handlers share.

#ifndef JAX_MAGI_FFI_CHECKS_H_
#define JAX_MAGI_FFI_CHECKS_H_

#include <initializer_list>
#include <string>

#include "cc/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jax_magi {

// An operand or result, with its name for errors.
struct NamedBuffer {
  const char* name;
  xla::ffi::AnyBuffer buffer;
};

// `context` is the op's name. Each check returns an error that names the op and the operand.
xla::ffi::Error CheckDims(const char* context, const NamedBuffer& named,
                          std::initializer_list<int64_t> expected);
xla::ffi::Error CheckDType(const char* context, const NamedBuffer& named,
                           std::initializer_list<xla::ffi::DataType> allowed);
// Checks the alignment that vector loads and TMA need. A separate XLA array always has it; a part
// of one may not.
xla::ffi::Error CheckAligned(const char* context, std::initializer_list<NamedBuffer> arrays);
xla::ffi::Error Invalid(const char* context, const char* name, const std::string& what);

DType ToDType(xla::ffi::DataType type);

}  // namespace jax_magi

#define JAX_MAGI_RETURN_IF_ERROR(expression) \
  if (xla::ffi::Error error = (expression); error.failure()) return error

#endif  // JAX_MAGI_FFI_CHECKS_H_
