// Hands the CUDA handlers to Python as capsules, by target name, and what tracing asks of them.

#include <nanobind/nanobind.h>

#include "cc/ffi/handlers.h"

namespace nb = nanobind;

namespace {

using Ints = nb::tuple;

jax_magi::AttentionShape ToShape(const Ints& q, const Ints& k, int64_t value_dim,
                                 const Ints& slices) {
  const auto at = [](const Ints& dims, int i) { return nb::cast<int64_t>(dims[i]); };
  return {/*batch=*/at(q, 0),
          /*q_len=*/at(q, 1),
          /*k_len=*/at(k, 1),
          /*num_q_heads=*/at(q, 2),
          /*num_kv_heads=*/at(k, 2),
          /*head_dim=*/at(q, 3),
          value_dim,
          /*num_slices=*/at(slices, 1),
          /*shared_slices=*/at(slices, 0) == 1};
}

jax_magi::DType ToDType(bool is_bf16) {
  return is_bf16 ? jax_magi::DType::kBF16 : jax_magi::DType::kF16;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("handlers", [] {
    nb::dict handlers;
    handlers["jax_magi_attention_forward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cuda_attention_forward));
    return handlers;
  });
  m.def("forward_workspace", [](Ints q, Ints k, int64_t value_dim, Ints slices, bool is_bf16,
                                bool has_softcap, bool has_plan) {
    return jax_magi_cuda_forward_workspace(ToShape(q, k, value_dim, slices), ToDType(is_bf16),
                                           has_softcap, has_plan);
  });
  m.def("forward_plan", [](Ints q, Ints k, int64_t value_dim, Ints slices, bool is_bf16,
                           bool has_softcap, nb::bytes values) {
    const jax_magi::AttentionShape shape = ToShape(q, k, value_dim, slices);
    if (values.size() != shape.num_slices * sizeof(jax_magi::Slice)) {
      throw nb::value_error("one slice list is expected");
    }
    const std::vector<int32_t> plan =
        jax_magi_cuda_forward_plan(shape, ToDType(is_bf16), has_softcap,
                                   reinterpret_cast<const jax_magi::Slice*>(values.c_str()));
    return nb::bytes(reinterpret_cast<const char*>(plan.data()), plan.size() * sizeof(int32_t));
  });
}
