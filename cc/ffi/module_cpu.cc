// Provides Python with the CPU handlers as capsules, by target name, the needs of a call, and what
// the build contains.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cc/ffi/attention_module.h"
#include "cc/ffi/handlers.h"

namespace nb = nanobind;

NB_MODULE(_cpu, m) {
  m.def("handlers", [] {
    nb::dict handlers;
    const auto add = [&](const char* name, auto* handler) {
      handlers[name] = nb::capsule(reinterpret_cast<void*>(handler));
    };
    add("jax_magi_attention_forward", jax_magi_cpu_attention_forward);
    add("jax_magi_attention_backward", jax_magi_cpu_attention_backward);
    add("jax_magi_softmax_forward", jax_magi_cpu_softmax_forward);
    add("jax_magi_softmax_backward", jax_magi_cpu_softmax_backward);
    return handlers;
  });
  jax_magi::AddAttentionNeeds(m, jax_magi_cpu_attention_needs);
  m.def("variants", jax_magi_cpu_variants);
  m.attr("COMMIT") = JAX_MAGI_COMMIT;
  m.attr("COMPILER") = JAX_MAGI_COMPILER;
  m.attr("LEFT_OUT") = JAX_MAGI_LEFT_OUT;
}
