"""A kernel that stands in for communication on a single GPU.

Its FFI targets are registered here, and therefore only in benchmarks.
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

  It stands in for communication on a single GPU. Each `cluster_size` CTAs must find a place at
  once, like those of NCCL if NCCL_CGA_CLUSTER_SIZE is set. The copy begins `delay_us` late. Pass
  the result only to `finish_stand_in`.
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
  """The copy of x, from the operand and the result of `start_stand_in`."""
  (y,) = native_call(STAND_IN_TARGETS[1], (x, y), [(y.shape, y.dtype)], aliases={1: 0})
  return y
