#include "cc/ffi/checks.h"

#include <algorithm>
#include <cstdint>

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

template <typename Dims>
std::string ToString(const Dims& dims) {
  std::string text = "[";
  for (int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

}  // namespace

ffi::Error Invalid(const char* context, const char* name, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string(context) + ": " + name + " " + what);
}

ffi::Error CheckDims(const char* context, const NamedBuffer& named,
                     std::initializer_list<int64_t> expected) {
  const auto dims = named.buffer.dimensions();
  if (dims.size() == expected.size() && std::equal(dims.begin(), dims.end(), expected.begin())) {
    return ffi::Error::Success();
  }
  return Invalid(context, named.name,
                 "must have shape " + ToString(expected) + ", got " + ToString(dims));
}

ffi::Error CheckDType(const char* context, const NamedBuffer& named,
                      std::initializer_list<ffi::DataType> allowed) {
  for (ffi::DataType type : allowed) {
    if (named.buffer.element_type() == type) return ffi::Error::Success();
  }
  return Invalid(context, named.name, "has an unsupported element type");
}

ffi::Error CheckAligned(const char* context, std::initializer_list<NamedBuffer> arrays) {
  for (const NamedBuffer& array : arrays) {
    if (reinterpret_cast<uintptr_t>(array.buffer.untyped_data()) % 16 != 0) {
      return Invalid(context, array.name, "must begin at a multiple of 16 bytes");
    }
  }
  return ffi::Error::Success();
}

DType ToDType(ffi::DataType type) {
  switch (type) {
    case ffi::BF16:
      return DType::kBF16;
    case ffi::F16:
      return DType::kF16;
    default:
      return DType::kF32;
  }
}

}  // namespace jax_magi
