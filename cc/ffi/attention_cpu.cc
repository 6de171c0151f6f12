// FFI handlers of the CPU kernels: decode, check, call.

#include "cc/cpu/attention.h"
#include "cc/cpu/select.h"
#include "cc/ffi/attention_bindings.h"
#include "cc/ffi/attention_checks.h"
#include "cc/ffi/handlers.h"
#include "cc/ffi/thread_pool.h"

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

ffi::Error Forward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::AnyBuffer slices, ffi::AnyBuffer sink, ffi::AnyBuffer bias,
                   ffi::AnyBuffer alibi_slopes, ffi::AnyBuffer /*tile_list*/,
                   ffi::RemainingArgs running, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> max_logits,
                   ffi::Result<ffi::AnyBuffer> /*workspace*/, float softmax_scale, float softcap,
                   int32_t /*sm_margin*/, int32_t /*tile_stamp*/, std::string_view /*architecture*/,
                   int32_t /*shared_memory_bytes*/) {
  ForwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(DecodeForward(q, k, v, slices, sink, bias, alibi_slopes, running, *out,
                                         *lse, *max_logits, softmax_scale, softcap, &args));
  return Finish("jax_magi attention forward", cpu::AttentionForward(args, OnPool(pool)));
}

ffi::Error Backward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::AnyBuffer dout, ffi::AnyBuffer lse, ffi::AnyBuffer delta,
                    ffi::AnyBuffer slices, ffi::AnyBuffer bias, ffi::AnyBuffer alibi_slopes,
                    ffi::AnyBuffer /*tile_list*/, ffi::RemainingArgs running,
                    ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                    ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dbias,
                    ffi::Result<ffi::AnyBuffer> dslopes, ffi::Result<ffi::AnyBuffer> /*workspace*/,
                    float softmax_scale, float softcap, bool /*deterministic: always*/,
                    int32_t /*sm_margin*/, int32_t /*tile_stamp*/,
                    std::string_view /*architecture*/, int32_t /*shared_memory_bytes*/,
                    int32_t /*num_dkv_parts*/) {
  BackwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(DecodeBackward(q, k, v, dout, lse, delta, slices, bias, alibi_slopes,
                                          running, *dq, *dk, *dv, *dbias, *dslopes,
                                          /*is_dq_summed=*/true, softmax_scale, softcap, &args));
  if (args.dq_sum != nullptr && args.dq_sum_words < cpu::DqSumWords(args.shape)) {
    return Invalid("jax_magi attention backward", "dq", "is too small for the sum");
  }
  if (args.dbias != nullptr && args.dbias_dtype != DType::kF32) {
    return Invalid("jax_magi attention backward", "dbias", "must be float32: it is summed");
  }
  return Finish("jax_magi attention backward",
                cpu::AttentionBackward(args, pool.num_threads(), OnPool(pool)));
}

}  // namespace
}  // namespace jax_magi

// At global scope: inside the namespace, gcc would not give them the visibility of handlers.h.
namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cpu_attention_forward, jax_magi::Forward,
                              jax_magi::ForwardBinding<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cpu_attention_backward, jax_magi::Backward,
                              jax_magi::BackwardBinding<ffi::ThreadPool>());

jax_magi::AttentionNeeds jax_magi_cpu_attention_needs(const jax_magi::AttentionCall& call,
                                                      const jax_magi::Slice* /*slices*/) {
  jax_magi::AttentionNeeds needs;
  needs.is_dq_summed = call.is_backward;
  needs.dq_sum_words = jax_magi::cpu::DqSumWords(call.shape);
  needs.is_dbias_summed = call.wants_dbias;
  return needs;
}

std::map<std::string, std::vector<std::string>> jax_magi_cpu_variants() {
  return {{"instruction sets", jax_magi::cpu::InstructionSets()},
          {"instruction set of this processor", {jax_magi::cpu::SelectedInstructionSet()}}};
}
