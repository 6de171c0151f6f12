// How CPU kernels request threads.

#ifndef JAX_MAGI_CPU_PARALLEL_FOR_H_
#define JAX_MAGI_CPU_PARALLEL_FOR_H_

#include <cstdint>
#include <functional>

namespace jax_magi::cpu {

// Runs `work(i, scratch)` for i in [0, num_tasks), each call with `scratch_floats` floats of its
// own, 64-byte aligned. Returns false if memory runs out; then no work was done.
using ParallelFor = std::function<bool(int64_t num_tasks, int64_t scratch_floats,
                                       const std::function<void(int64_t, float*)>& work)>;

}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_PARALLEL_FOR_H_
