// Hands the CPU handlers to Python as capsules, by target name.

#include <nanobind/nanobind.h>

#include "cc/ffi/handlers.h"

namespace nb = nanobind;

NB_MODULE(_cpu, m) {
  m.def("handlers", [] {
    nb::dict handlers;
    handlers["jax_magi_attention_forward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cpu_attention_forward));
    handlers["jax_magi_attention_backward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cpu_attention_backward));
    handlers["jax_magi_softmax_forward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cpu_softmax_forward));
    handlers["jax_magi_softmax_backward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cpu_softmax_backward));
    return handlers;
  });
}
