#include "cc/ffi/softmax_checks.h"

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

ffi::Error DecodeShape(const char* context, const NamedBuffer& x, int32_t lo, int32_t hi,
                       SoftmaxShape* shape) {
  const auto dims = x.buffer.dimensions();
  if (dims.size() != 4) return Invalid(context, x.name, "must have 4 dimensions");
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, x, {ffi::F32, ffi::BF16, ffi::F16}));
  *shape = {dims[0], dims[1], dims[2], dims[3], ToDType(x.buffer.element_type()), lo, hi};
  if (shape->q_len >= kUnbounded || shape->k_len >= kUnbounded) {
    return Invalid(context, x.name, "must be shorter than 2**30 rows and columns");
  }
  return ffi::Error::Success();
}

ffi::Error CheckLike(const char* context, const NamedBuffer& named, ffi::AnyBuffer like) {
  const auto dims = like.dimensions();
  JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, named, {dims[0], dims[1], dims[2], dims[3]}));
  return CheckDType(context, named, {like.element_type()});
}

// Decodes one float per row, or nothing: then `*values` is null.
ffi::Error DecodeRowValues(const char* context, const NamedBuffer& named, const SoftmaxShape& s,
                           float** values) {
  *values = nullptr;
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, named, {ffi::F32}));
  if (named.buffer.element_count() == 0) return ffi::Error::Success();
  *values = static_cast<float*>(named.buffer.untyped_data());
  return CheckDims(context, named, {s.batch, s.heads, s.q_len});
}

ffi::Error DecodeMask(const NamedBuffer& named, ffi::DataType x_type, const SoftmaxShape& s,
                      SoftmaxMask* mask) {
  const ffi::AnyBuffer& buffer = named.buffer;
  if (buffer.element_count() == 0) return ffi::Error::Success();
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(kSoftmaxForward, named, {ffi::PRED, ffi::F32, x_type}));
  const auto dims = buffer.dimensions();
  if (dims.size() != 4) return Invalid(kSoftmaxForward, named.name, "must have 4 dimensions");
  const int64_t sizes[4] = {s.batch, s.heads, s.q_len, s.k_len};
  int64_t* const strides[4] = {&mask->batch_stride, &mask->head_stride, &mask->row_stride,
                               &mask->column_stride};
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    if (dims[i] != 1 && dims[i] != sizes[i]) {
      return Invalid(kSoftmaxForward, named.name, "must have x's dimensions, or 1");
    }
    *strides[i] = dims[i] == 1 ? 0 : stride;
    stride *= dims[i];
  }
  mask->kind = buffer.element_type() == ffi::PRED ? MaskKind::kBool : MaskKind::kAdditive;
  mask->dtype = ToDType(buffer.element_type());
  mask->data = buffer.untyped_data();
  return ffi::Error::Success();
}

}  // namespace

ffi::Error DecodeSoftmaxForward(ffi::AnyBuffer x, ffi::AnyBuffer mask, ffi::AnyBuffer offset,
                                ffi::AnyBuffer y, ffi::AnyBuffer offset_probability, float scale,
                                int32_t lo, int32_t hi, SoftmaxForwardArgs* args) {
  const char* context = kSoftmaxForward;
  JAX_MAGI_RETURN_IF_ERROR(DecodeShape(context, {"x", x}, lo, hi, &args->shape));
  const SoftmaxShape& s = args->shape;
  JAX_MAGI_RETURN_IF_ERROR(CheckLike(context, {"y", y}, x));
  JAX_MAGI_RETURN_IF_ERROR(DecodeMask({"mask", mask}, x.element_type(), s, &args->mask));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"offset", offset}, {ffi::F32}));
  const bool has_offset = offset.element_count() > 0;
  if (has_offset) {
    const auto dims = offset.dimensions();
    const bool is_shared = dims.size() > 0 && dims[0] == 1;
    JAX_MAGI_RETURN_IF_ERROR(
        CheckDims(context, {"offset", offset}, {is_shared ? 1 : s.batch, s.heads}));
    args->offset_batch_stride = is_shared ? 0 : s.heads;
  }
  JAX_MAGI_RETURN_IF_ERROR(DecodeRowValues(context, {"offset_probability", offset_probability}, s,
                                           &args->offset_probability));
  if (has_offset && s.num_rows() > 0 && args->offset_probability == nullptr) {
    return Invalid(context, "offset_probability", "must be there for an offset");
  }
  args->scale = scale;
  args->x = x.untyped_data();
  args->offset = has_offset ? static_cast<const float*>(offset.untyped_data()) : nullptr;
  args->y = y.untyped_data();
  return ffi::Error::Success();
}

ffi::Error DecodeSoftmaxBackward(ffi::AnyBuffer y, ffi::AnyBuffer dy, ffi::AnyBuffer dx,
                                 ffi::AnyBuffer dot, float scale, int32_t lo, int32_t hi,
                                 SoftmaxBackwardArgs* args) {
  const char* context = kSoftmaxBackward;
  JAX_MAGI_RETURN_IF_ERROR(DecodeShape(context, {"y", y}, lo, hi, &args->shape));
  JAX_MAGI_RETURN_IF_ERROR(CheckLike(context, {"dy", dy}, y));
  JAX_MAGI_RETURN_IF_ERROR(CheckLike(context, {"dx", dx}, y));
  JAX_MAGI_RETURN_IF_ERROR(DecodeRowValues(context, {"dot", dot}, args->shape, &args->dot));
  args->scale = scale;
  args->y = y.untyped_data();
  args->dy = dy.untyped_data();
  args->dx = dx.untyped_data();
  return ffi::Error::Success();
}

}  // namespace jax_magi
