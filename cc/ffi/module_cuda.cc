// Hands the CUDA handlers to Python as capsules, by target name, and what tracing asks of them.

#include <nanobind/nanobind.h>

#include "cc/ffi/handlers.h"

namespace nb = nanobind;

namespace {

jax_magi::AttentionShape ToShape(const nb::tuple& q, const nb::tuple& k, int64_t value_dim,
                                 const nb::tuple& slices) {
  const auto at = [](const nb::tuple& dims, int i) { return nb::cast<int64_t>(dims[i]); };
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

// See the stub, _cuda.pyi.
nb::tuple Needs(nb::tuple q, nb::tuple k, int64_t value_dim, nb::tuple slices, bool is_bf16,
                bool has_softcap, bool is_backward, bool deterministic, nb::object values) {
  const CudaCall call{ToShape(q, k, value_dim, slices),
                      is_bf16 ? jax_magi::DType::kBF16 : jax_magi::DType::kF16, has_softcap,
                      is_backward, deterministic};
  const jax_magi::Slice* list = nullptr;
  if (!values.is_none()) {
    const nb::bytes bytes = nb::cast<nb::bytes>(values);
    if (bytes.size() != call.shape.num_slices * sizeof(jax_magi::Slice)) {
      throw nb::value_error("one slice list is expected");
    }
    list = reinterpret_cast<const jax_magi::Slice*>(bytes.c_str());
  }
  const CudaCallNeeds needs = jax_magi_cuda_needs(call, list);
  return nb::make_tuple(needs.workspace_bytes, needs.num_splits,
                        nb::bytes(reinterpret_cast<const char*>(needs.plan.data()),
                                  needs.plan.size() * sizeof(int32_t)));
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("handlers", [] {
    nb::dict handlers;
    handlers["jax_magi_attention_forward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cuda_attention_forward));
    handlers["jax_magi_attention_backward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cuda_attention_backward));
    handlers["jax_magi_softmax_forward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cuda_softmax_forward));
    handlers["jax_magi_softmax_backward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cuda_softmax_backward));
    return handlers;
  });
  m.def("needs", &Needs, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg().none());
}
