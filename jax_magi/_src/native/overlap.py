"""What helps computation and communication to run at the same time, as JAX functions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jax_magi._src.native.backends import CUDA
from jax_magi._src.native.call import native_call

# What stands in for communication in benchmarks, which alone register it: its beginning, and its
# end.
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
  return _barrier_where_kernels_are(x) if CUDA.has_attention_device() else x


@custom_vmap
def _barrier_where_kernels_are(x: jax.Array) -> jax.Array:
  result: jax.Array = lax.platform_dependent(
    x, **{CUDA.platform: _kernel_barrier, "default": lambda x: x}
  )
  return result


@_barrier_where_kernels_are.def_vmap
def _(axis_size: int, is_mapped: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
  del axis_size, is_mapped  # One barrier for the whole batch.
  return _barrier_where_kernels_are(x), True


def _kernel_barrier(x: jax.Array) -> jax.Array:
  results = [(x.shape, x.dtype), ((_WORKSPACE_BYTES,), np.uint8)]
  return native_call("jax_magi_kernel_barrier", (x,), results, aliases={0: 0})[0]
