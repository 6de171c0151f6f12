// Provides Python with the CUDA handlers as capsules, by target name, the needs of a call, and what
// the build contains.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cc/ffi/attention_module.h"
#include "cc/ffi/handlers.h"

namespace nb = nanobind;

namespace {

// Adds a handler to a dict, under the name of its target.
struct Adder {
  nb::dict& handlers;

  template <typename Handler>
  void operator()(const char* name, Handler* handler) const {
    handlers[name] = nb::capsule(reinterpret_cast<void*>(handler));
  }
};

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("handlers", [] {
    nb::dict handlers;
    const Adder add{handlers};
    add("jax_magi_attention_forward", jax_magi_cuda_attention_forward);
    add("jax_magi_attention_backward", jax_magi_cuda_attention_backward);
    add("jax_magi_attention_finish_dq", jax_magi_cuda_attention_finish_dq);
    add("jax_magi_attention_tile_list", jax_magi_cuda_attention_tile_list);
    add("jax_magi_attention_tile_lists", jax_magi_cuda_attention_tile_lists);
    add("jax_magi_softmax_forward", jax_magi_cuda_softmax_forward);
    add("jax_magi_softmax_backward", jax_magi_cuda_softmax_backward);
    add("jax_magi_kernel_barrier", jax_magi_cuda_kernel_barrier);
    return handlers;
  });
  // Not useful in a user's program: Python registers these only for benchmarks.
  m.def("benchmark_handlers", [] {
    nb::dict handlers;
    const Adder add{handlers};
    add("jax_magi_stand_in_start", jax_magi_cuda_stand_in_start);
    add("jax_magi_stand_in_done", jax_magi_cuda_stand_in_done);
    return handlers;
  });
  jax_magi::AddAttentionNeeds(m, jax_magi_cuda_attention_needs);
  m.def("read_tile_stamp", jax_magi_cuda_read_tile_stamp);
  m.def("shared_memory_of", jax_magi::SharedMemoryOf);
  m.def("stamp_of_blocks", jax_magi_cuda_stamp_of_blocks);
  m.def("variants", jax_magi_cuda_variants);
  m.attr("COMMIT") = JAX_MAGI_COMMIT;
  m.attr("COMPILER") = JAX_MAGI_COMPILER;
  m.attr("LEFT_OUT") = JAX_MAGI_LEFT_OUT;
}
