#include "cc/ffi/attention_checks.h"

namespace jax_magi {
namespace ffi = xla::ffi;
namespace {

// Checks bias and slopes, and sets them in the arguments of a forward or backward call.
template <typename Args>
ffi::Error DecodeTerms(const char* context, ffi::AnyBuffer q, ffi::AnyBuffer bias,
                       ffi::AnyBuffer alibi_slopes, Args* args) {
  const AttentionShape& s = args->shape;
  args->bias = nullptr;
  args->bias_layout = {};
  if (bias.element_count() > 0) {
    const auto dims = bias.dimensions();
    if (dims.size() != 4) return Invalid(context, "bias", "must have 4 dimensions");
    const auto either = [](int64_t size, int64_t full) { return size == 1 ? 1 : full; };
    JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, {"bias", bias},
                                       {either(dims[0], s.batch), either(dims[1], s.num_q_heads),
                                        either(dims[2], s.q_len), s.k_len}));
    JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"bias", bias}, {q.element_type(), ffi::F32}));
    args->bias = bias.untyped_data();
    args->bias_layout = BiasLayoutOf(s, ToDType(bias.element_type()), dims[0], dims[1], dims[2]);
  }
  args->alibi_slopes = nullptr;
  if (alibi_slopes.element_count() > 0) {
    const NamedBuffer named{"alibi_slopes", alibi_slopes};
    JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, named, {s.batch, s.num_q_heads}));
    JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, named, {ffi::F32}));
    args->alibi_slopes = static_cast<const float*>(alibi_slopes.untyped_data());
  }
  return ffi::Error::Success();
}

// Checks a call that continues with the results of others.
template <typename Args>
ffi::Error CheckNoTerms(const char* context, const Args& args) {
  const char* what = "is not taken together with running results";
  if (args.bias != nullptr) return Invalid(context, "bias", what);
  if (args.alibi_slopes != nullptr) return Invalid(context, "alibi_slopes", what);
  return ffi::Error::Success();
}

// Checks the gradients of the terms, if they are requested.
ffi::Error DecodeTermGradients(const char* context, ffi::AnyBuffer bias,
                               ffi::AnyBuffer alibi_slopes, ffi::AnyBuffer dbias,
                               ffi::AnyBuffer dslopes, BackwardArgs* args) {
  args->dbias = nullptr;
  args->dbias_dtype = ToDType(dbias.element_type());
  if (dbias.element_count() > 0) {
    const auto dims = bias.dimensions();
    if (args->bias == nullptr) return Invalid(context, "dbias", "needs a bias");
    JAX_MAGI_RETURN_IF_ERROR(
        CheckDims(context, {"dbias", dbias}, {dims[0], dims[1], dims[2], dims[3]}));
    JAX_MAGI_RETURN_IF_ERROR(
        CheckDType(context, {"dbias", dbias}, {bias.element_type(), ffi::F32}));
    args->dbias = dbias.untyped_data();
  }
  args->dslopes = nullptr;
  if (dslopes.element_count() > 0) {
    const AttentionShape& s = args->shape;
    if (args->alibi_slopes == nullptr) return Invalid(context, "dslopes", "needs alibi_slopes");
    JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, {"dslopes", dslopes}, {s.batch, s.num_q_heads}));
    JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"dslopes", dslopes}, {ffi::F32}));
    args->dslopes = static_cast<float*>(dslopes.untyped_data());
  }
  return ffi::Error::Success();
}

// Checks that running results share the memory of the call's results, except those that the call
// rounds from float32.
ffi::Error CheckRunning(const char* context, ffi::RemainingArgs running,
                        std::initializer_list<NamedBuffer> results) {
  if (running.size() != results.size()) {
    return ffi::Error::InvalidArgument(std::string(context) + ": there must be " +
                                       std::to_string(results.size()) + " running results, got " +
                                       std::to_string(running.size()));
  }
  size_t i = 0;
  for (const NamedBuffer& result : results) {
    const auto buffer = running.get<ffi::AnyBuffer>(i++);
    if (buffer.has_error()) return buffer.error();
    const auto dtype = result.buffer.element_type();
    JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {result.name, *buffer}, {ffi::F32, dtype}));
    if (buffer->element_type() == dtype && result.buffer.element_count() > 0 &&
        buffer->untyped_data() != result.buffer.untyped_data()) {
      return Invalid(context, result.name, "must share the memory of the running result");
    }
    if (buffer->element_count() != result.buffer.element_count()) {
      return Invalid(context, result.name, "must be as large as the running result");
    }
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error CheckSlices(const char* context, ffi::AnyBuffer slices) {
  const auto dims = slices.dimensions();
  if (dims.size() != 3) return Invalid(context, "slices", "must have 3 dimensions");
  JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, {"slices", slices}, {dims[0], dims[1], 6}));
  return CheckDType(context, {"slices", slices}, {ffi::S32});
}

ffi::Error DecodeAttention(const char* context, ffi::AnyBuffer q, ffi::AnyBuffer k,
                           ffi::AnyBuffer v, ffi::AnyBuffer slices, AttentionShape* shape,
                           DType* dtype) {
  for (const NamedBuffer& named : {NamedBuffer{"q", q}, {"k", k}, {"v", v}}) {
    if (named.buffer.dimensions().size() != 4) {
      return Invalid(context, named.name, "must have 4 dimensions");
    }
  }
  JAX_MAGI_RETURN_IF_ERROR(CheckSlices(context, slices));
  const auto q_dims = q.dimensions(), k_dims = k.dimensions();
  *shape = {/*batch=*/q_dims[0],
            /*q_len=*/q_dims[1],
            /*k_len=*/k_dims[1],
            /*num_q_heads=*/q_dims[2],
            /*num_kv_heads=*/k_dims[2],
            /*head_dim=*/q_dims[3],
            /*value_dim=*/v.dimensions()[3],
            /*num_slices=*/slices.dimensions()[1],
            /*shared_slices=*/slices.dimensions()[0] == 1};

  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"q", q}, {ffi::F32, ffi::BF16, ffi::F16}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"k", k}, {q.element_type()}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"v", v}, {q.element_type()}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDims(
      context, {"k", k}, {shape->batch, shape->k_len, shape->num_kv_heads, shape->head_dim}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDims(
      context, {"v", v}, {shape->batch, shape->k_len, shape->num_kv_heads, shape->value_dim}));
  JAX_MAGI_RETURN_IF_ERROR(
      CheckDims(context, {"slices", slices},
                {shape->shared_slices ? 1 : shape->batch, shape->num_slices, 6}));
  if (shape->q_len >= kUnbounded) return Invalid(context, "q", "must be shorter than 2**30 rows");
  if (shape->k_len >= kUnbounded) return Invalid(context, "k", "must be shorter than 2**30 rows");
  if (shape->num_kv_heads == 0 ? shape->num_q_heads != 0
                               : shape->num_q_heads % shape->num_kv_heads != 0) {
    return Invalid(context, "q",
                   "must have a multiple of k's " + std::to_string(shape->num_kv_heads) +
                       " heads, got " + std::to_string(shape->num_q_heads));
  }
  *dtype = ToDType(q.element_type());
  return ffi::Error::Success();
}

ffi::Error DecodeForward(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         ffi::AnyBuffer slices, ffi::AnyBuffer sink, ffi::AnyBuffer bias,
                         ffi::AnyBuffer alibi_slopes, ffi::RemainingArgs running,
                         ffi::AnyBuffer out, ffi::AnyBuffer lse, ffi::AnyBuffer max_logits,
                         float softmax_scale, float softcap, ForwardArgs* args) {
  const char* context = "jax_magi attention forward";
  JAX_MAGI_RETURN_IF_ERROR(DecodeAttention(context, q, k, v, slices, &args->shape, &args->dtype));
  const AttentionShape& s = args->shape;
  JAX_MAGI_RETURN_IF_ERROR(DecodeTerms(context, q, bias, alibi_slopes, args));
  JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, {"sink", sink}, {s.batch, s.num_q_heads}));
  JAX_MAGI_RETURN_IF_ERROR(
      CheckDims(context, {"out", out}, {s.batch, s.q_len, s.num_q_heads, s.value_dim}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, {"lse", lse}, {s.batch, s.q_len, s.num_q_heads}));
  JAX_MAGI_RETURN_IF_ERROR(
      CheckDims(context, {"max_logits", max_logits}, {s.batch, s.num_q_heads}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"out", out}, {q.element_type(), ffi::F32}));
  for (const NamedBuffer& named :
       {NamedBuffer{"sink", sink}, {"lse", lse}, {"max_logits", max_logits}}) {
    JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, named, {ffi::F32}));
  }
  args->running_out = nullptr;
  if (running.size() > 0) {
    JAX_MAGI_RETURN_IF_ERROR(
        CheckRunning(context, running, {{"out", out}, {"lse", lse}, {"max_logits", max_logits}}));
    JAX_MAGI_RETURN_IF_ERROR(CheckNoTerms(context, *args));
    const auto running_out = running.get<ffi::AnyBuffer>(0);
    args->running_out = running_out->untyped_data();
    args->running_dtype = ToDType(running_out->element_type());
  }
  args->params = {softmax_scale, softcap};
  args->out_dtype = ToDType(out.element_type());
  args->q = q.untyped_data();
  args->k = k.untyped_data();
  args->v = v.untyped_data();
  args->slices = static_cast<const Slice*>(slices.untyped_data());
  args->sink = static_cast<const float*>(sink.untyped_data());
  args->out = out.untyped_data();
  args->lse = static_cast<float*>(lse.untyped_data());
  args->max_logits = static_cast<float*>(max_logits.untyped_data());
  return ffi::Error::Success();
}

ffi::Error DecodeBackward(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer dout,
                          ffi::AnyBuffer lse, ffi::AnyBuffer delta, ffi::AnyBuffer slices,
                          ffi::AnyBuffer bias, ffi::AnyBuffer alibi_slopes,
                          ffi::RemainingArgs running, ffi::AnyBuffer dq, ffi::AnyBuffer dk,
                          ffi::AnyBuffer dv, ffi::AnyBuffer dbias, ffi::AnyBuffer dslopes,
                          bool is_dq_summed, float softmax_scale, float softcap,
                          BackwardArgs* args) {
  const char* context = "jax_magi attention backward";
  JAX_MAGI_RETURN_IF_ERROR(DecodeAttention(context, q, k, v, slices, &args->shape, &args->dtype));
  const AttentionShape& s = args->shape;
  JAX_MAGI_RETURN_IF_ERROR(DecodeTerms(context, q, bias, alibi_slopes, args));
  JAX_MAGI_RETURN_IF_ERROR(DecodeTermGradients(context, bias, alibi_slopes, dbias, dslopes, args));
  JAX_MAGI_RETURN_IF_ERROR(
      CheckDims(context, {"dout", dout}, {s.batch, s.q_len, s.num_q_heads, s.value_dim}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, {"lse", lse}, {s.batch, s.q_len, s.num_q_heads}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDims(context, {"delta", delta}, {s.batch, s.q_len, s.num_q_heads}));
  args->dq_sum = nullptr;
  args->dq_sum_words = 0;
  const bool is_running = running.size() > 0;
  if (is_running) {
    if (dq.dimensions().size() != 3) return Invalid(context, "dq", "must have 3 dimensions");
    args->dq_sum_words = dq.dimensions()[2];
    JAX_MAGI_RETURN_IF_ERROR(
        CheckDims(context, {"dq", dq}, {s.batch, s.num_q_heads, args->dq_sum_words}));
    JAX_MAGI_RETURN_IF_ERROR(CheckRunning(context, running, {{"dq", dq}}));
    JAX_MAGI_RETURN_IF_ERROR(CheckNoTerms(context, *args));
    args->dq_sum = static_cast<float*>(dq.untyped_data());
  } else {
    JAX_MAGI_RETURN_IF_ERROR(
        CheckDims(context, {"dq", dq}, {s.batch, s.q_len, s.num_q_heads, s.head_dim}));
  }
  JAX_MAGI_RETURN_IF_ERROR(
      CheckDims(context, {"dk", dk}, {s.batch, s.k_len, s.num_kv_heads, s.head_dim}));
  JAX_MAGI_RETURN_IF_ERROR(
      CheckDims(context, {"dv", dv}, {s.batch, s.k_len, s.num_kv_heads, s.value_dim}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"dout", dout}, {q.element_type()}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"dk", dk}, {q.element_type(), ffi::F32}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"dv", dv}, {dk.element_type()}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"lse", lse}, {ffi::F32}));
  JAX_MAGI_RETURN_IF_ERROR(CheckDType(context, {"delta", delta}, {ffi::F32}));
  JAX_MAGI_RETURN_IF_ERROR(
      CheckDType(context, {"dq", dq}, {is_dq_summed || is_running ? ffi::F32 : dk.element_type()}));
  args->params = {softmax_scale, softcap};
  args->dq_dtype = ToDType(dq.element_type());
  args->dkv_dtype = ToDType(dk.element_type());
  args->q = q.untyped_data();
  args->k = k.untyped_data();
  args->v = v.untyped_data();
  args->dout = dout.untyped_data();
  args->lse = static_cast<const float*>(lse.untyped_data());
  args->delta = static_cast<const float*>(delta.untyped_data());
  args->slices = static_cast<const Slice*>(slices.untyped_data());
  args->dq = is_running ? nullptr : dq.untyped_data();
  args->dk = dk.untyped_data();
  args->dv = dv.untyped_data();
  return ffi::Error::Success();
}

}  // namespace jax_magi
