"""What helps computation and communication to run at the same time, as JAX functions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jax_magi._src.native.backends import HOPPER
from jax_magi._src.native.call import native_call

# What stands in for communication: its beginning, and its end.
STAND_IN_TARGETS = ("jax_magi_stand_in_start", "jax_magi_stand_in_done")
# Bytes that the barrier works in, and more.
_WORKSPACE_BYTES = 1024
# How the names of scopes begin around collectives that move keys, values and gradients between
# ranks: around those that a kernel is to hide, and those that none can. The kind follows.
EXCHANGE_SCOPE = "jax_magi_exchange"
SINGLE_EXCHANGE_SCOPE = "jax_magi_single_exchange"


def exchange_scope(kind: str, *, is_single: bool) -> Any:
  """The scope by which `jax_magi.overlap` knows our collectives in the text of a program.

  Args:
    kind: the hop's.
    is_single: whether there is one transfer and one kernel after it, so that nothing can hide it.
  """
  return jax.named_scope(f"{SINGLE_EXCHANGE_SCOPE if is_single else EXCHANGE_SCOPE}_{kind}")


def kernel_barrier(x: Any) -> Any:
  """x, when another kernel holds a streaming multiprocessor of the GPU, or after about 0.1 ms.

  A kernel that takes x can then not take the place of communication that was started before it.
  Elsewhere than on a GPU with our kernels: x.
  """
  return _barrier_where_kernels_are(x) if HOPPER.has_attention_device() else x


@custom_vmap
def _barrier_where_kernels_are(x: jax.Array) -> jax.Array:
  result: jax.Array = lax.platform_dependent(
    x, **{HOPPER.platform: _kernel_barrier, "default": lambda x: x}
  )
  return result


@_barrier_where_kernels_are.def_vmap
def _(axis_size: int, is_mapped: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
  del axis_size, is_mapped  # One barrier for the whole batch.
  return _barrier_where_kernels_are(x), True


def _kernel_barrier(x: jax.Array) -> jax.Array:
  results = [(x.shape, x.dtype), ((_WORKSPACE_BYTES,), np.uint8)]
  return native_call("jax_magi_kernel_barrier", (x,), results, aliases={0: 0})[0]


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
