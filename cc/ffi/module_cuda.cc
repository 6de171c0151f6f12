// Hands the CUDA handlers to Python as capsules, by target name.

#include <nanobind/nanobind.h>

#include "cc/ffi/handlers.h"

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  m.def("handlers", [] {
    nb::dict handlers;
    handlers["jax_magi_attention_forward"] =
        nb::capsule(reinterpret_cast<void*>(jax_magi_cuda_attention_forward));
    return handlers;
  });
}
