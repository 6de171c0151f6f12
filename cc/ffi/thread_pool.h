// CPU kernels on XLA's threads.

#ifndef JAX_MAGI_FFI_THREAD_POOL_H_
#define JAX_MAGI_FFI_THREAD_POOL_H_

#include "cc/cpu/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace jax_magi {

// Valid as long as `pool` is.
cpu::ParallelFor OnPool(xla::ffi::ThreadPool& pool);

// Converts the return value of a kernel for XLA: false means that memory ran out.
xla::ffi::Error Finish(const char* context, bool done);

}  // namespace jax_magi

#endif  // JAX_MAGI_FFI_THREAD_POOL_H_
