"""JAX functions that help computation and communication to overlap."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jax_magi._src.native.backends import CUDA
from jax_magi._src.native.call import native_call

# The start and the end of a stand-in for communication. Only benchmarks register these targets.
STAND_IN_TARGETS = ("jax_magi_stand_in_start", "jax_magi_stand_in_done")
# At least the workspace of the barrier.
_WORKSPACE_BYTES = 1024
# Prefixes of the named scopes around collectives that move keys, values and gradients between
# ranks: those that a kernel should hide, and those that no kernel can hide. The kind follows.
EXCHANGE_SCOPE = "jax_magi_exchange"
SINGLE_EXCHANGE_SCOPE = "jax_magi_single_exchange"


def exchange_scope(kind: str, *, is_single: bool) -> Any:
  """The named scope by which `jax_magi.overlap` finds our collectives in the text of a program.

  Args:
    kind: the kind of the hop.
    is_single: True if there is one transfer, followed by one kernel: then nothing can hide it.
  """
  return jax.named_scope(f"{SINGLE_EXCHANGE_SCOPE if is_single else EXCHANGE_SCOPE}_{kind}")


def kernel_barrier(x: Any) -> Any:
  """Delays x until another kernel occupies an SM of the GPU, for at most about 0.1 ms.

  A kernel that depends on the result then cannot occupy the SMs that communication, which was
  started before it, needs. On other devices, the result is x without a delay.
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
