// What the modules of all devices tell Python about attention when it traces a call.

#ifndef JAX_MAGI_FFI_ATTENTION_MODULE_H_
#define JAX_MAGI_FFI_ATTENTION_MODULE_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "cc/attention.h"

namespace jax_magi {

inline DType ParseDType(const std::string& name) {
  if (name == "float32") return DType::kF32;
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float16") return DType::kF16;
  throw nanobind::value_error("dtype must be float32, bfloat16 or float16");
}

inline Architecture ParseArchitecture(const std::string& name) {
  const std::optional<Architecture> architecture = ArchitectureOf(name);
  if (!architecture) throw nanobind::value_error("architecture must be none, sm90 or sm80");
  return *architecture;
}

// Adds attention_needs(...) and the struct that it returns: see the stub, _cpu.pyi. `needs` is the
// function of the device; its slices are one list that the whole batch shares, or null.
template <typename NeedsFn>
void AddAttentionNeeds(nanobind::module_& m, NeedsFn needs) {
  namespace nb = nanobind;
  nb::class_<AttentionNeeds>(m, "AttentionNeeds")
      .def_ro("workspace_bytes", &AttentionNeeds::workspace_bytes)
      .def_ro("num_dkv_parts", &AttentionNeeds::num_dkv_parts)
      .def_ro("is_dq_summed", &AttentionNeeds::is_dq_summed)
      .def_ro("dq_sum_words", &AttentionNeeds::dq_sum_words)
      .def_ro("is_dbias_summed", &AttentionNeeds::is_dbias_summed)
      .def_ro("tile_cost", &AttentionNeeds::tile_cost)
      .def_ro("tile_stamp", &AttentionNeeds::tile_stamp)
      .def_ro("tile_list_words", &AttentionNeeds::tile_list_words)
      .def_prop_ro("tile_list", [](const AttentionNeeds& self) {
        return nb::bytes(reinterpret_cast<const char*>(self.tile_list.data()),
                         self.tile_list.size() * sizeof(int32_t));
      });
  m.def(
      "attention_needs",
      [needs](nb::tuple q_shape, nb::tuple k_shape, int64_t value_dim, nb::tuple slices_shape,
              const std::string& dtype, bool has_softcap, bool is_backward, bool deterministic,
              nb::object static_slices, nb::object bias_shape, const std::string& bias_dtype,
              bool has_alibi, bool wants_dbias, bool wants_dslopes, bool sums_dq,
              bool has_float_grads, int num_sms, const std::string& architecture,
              int shared_memory_bytes) {
        const auto at = [](const nb::tuple& dims, int i) { return nb::cast<int64_t>(dims[i]); };
        const AttentionShape shape{/*batch=*/at(q_shape, 0),
                                   /*q_len=*/at(q_shape, 1),
                                   /*k_len=*/at(k_shape, 1),
                                   /*num_q_heads=*/at(q_shape, 2),
                                   /*num_kv_heads=*/at(k_shape, 2),
                                   /*head_dim=*/at(q_shape, 3),
                                   value_dim,
                                   /*num_slices=*/at(slices_shape, 1),
                                   /*shared_slices=*/at(slices_shape, 0) == 1};
        const Slice* slices = nullptr;
        if (!static_slices.is_none()) {
          const nb::bytes bytes = nb::cast<nb::bytes>(static_slices);
          if (!shape.shared_slices || bytes.size() != shape.num_slices * sizeof(Slice)) {
            throw nb::value_error("static_slices must be one slice list, of slices_shape");
          }
          slices = reinterpret_cast<const Slice*>(bytes.c_str());
        }
        AttentionCall call{shape, ParseDType(dtype), has_softcap, is_backward, deterministic};
        call.has_bias = !bias_shape.is_none();
        call.has_alibi = has_alibi;
        if (call.has_bias) {
          const nb::tuple dims = nb::cast<nb::tuple>(bias_shape);
          call.bias_layout =
              BiasLayoutOf(shape, ParseDType(bias_dtype), at(dims, 0), at(dims, 1), at(dims, 2));
        }
        call.wants_dbias = wants_dbias;
        call.wants_dslopes = wants_dslopes;
        call.sums_dq = sums_dq;
        call.has_float_grads = has_float_grads;
        call.num_sms = num_sms;
        call.target = {ParseArchitecture(architecture), shared_memory_bytes};
        return needs(call, slices);
      },
      nb::kw_only(), nb::arg("q_shape"), nb::arg("k_shape"), nb::arg("value_dim"),
      nb::arg("slices_shape"), nb::arg("dtype"), nb::arg("has_softcap"), nb::arg("is_backward"),
      nb::arg("deterministic"), nb::arg("static_slices").none(),
      nb::arg("bias_shape").none() = nb::none(), nb::arg("bias_dtype") = "float32",
      nb::arg("has_alibi") = false, nb::arg("wants_dbias") = false,
      nb::arg("wants_dslopes") = false, nb::arg("sums_dq") = false,
      nb::arg("has_float_grads") = false, nb::arg("num_sms") = 0, nb::arg("architecture") = "none",
      nb::arg("shared_memory_bytes") = kLeastSharedMemory);
}

}  // namespace jax_magi

#endif  // JAX_MAGI_FFI_ATTENTION_MODULE_H_
