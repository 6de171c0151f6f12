"""A kernel that stands in for communication where there is one GPU.

Its FFI targets are registered here, and so for benchmarks alone.
"""

from __future__ import annotations

import jax
import numpy as np

from jax_magi._src.native.backends import CUDA
from jax_magi._src.native.call import native_call
from jax_magi._src.native.overlap import STAND_IN_TARGETS

if CUDA.module is not None:
  for _name, _handler in CUDA.module.benchmark_handlers().items():
    jax.ffi.register_ffi_target(_name, _handler, platform=CUDA.ffi_platform)


def start_stand_in(
  x: jax.Array, *, num_sms: int, num_rounds: int, cluster_size: int = 1, delay_us: int = 0
) -> jax.Array:
  """Starts to copy x `num_rounds` times, by a kernel that holds `num_sms` multiprocessors.

  It stands in for communication where there is one GPU. `cluster_size` blocks of threads at a time
  have to find a place at once, as those of NCCL where NCCL_CGA_CLUSTER_SIZE is set. It begins
  `delay_us` late. The result is for `finish_stand_in` alone.
  """
  (y,) = native_call(
    STAND_IN_TARGETS[0],
    (x,),
    [(x.shape, x.dtype)],
    num_sms=np.int32(num_sms),
    num_rounds=np.int32(num_rounds),
    cluster_size=np.int32(cluster_size),
    delay_us=np.int32(delay_us),
  )
  return y


def finish_stand_in(x: jax.Array, y: jax.Array) -> jax.Array:
  """x, copied, from what was given to `start_stand_in` and what it returned."""
  (y,) = native_call(STAND_IN_TARGETS[1], (x, y), [(y.shape, y.dtype)], aliases={1: 0})
  return y
