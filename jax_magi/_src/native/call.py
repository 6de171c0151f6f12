"""The one place that calls the FFI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_magi._src.native import backends  # noqa: F401 (it registers the targets)
from jax_magi._src.transforms.varying import vary_together


def native_call(
  target: str,
  operands: Sequence[Any],
  results: Sequence[tuple[tuple[int, ...], Any]],
  *,
  aliases: dict[int, int] | None = None,
  **attributes: Any,
) -> tuple[jax.Array, ...]:
  """Calls the handler that is registered as `target` for the platform.

  Args:
    target: the FFI target name.
    operands: the arrays to pass.
    results: the shape and the dtype of each result.
    aliases: a map from operands to the results that may reuse their memory, both by index.
    **attributes: numpy scalars and bools. The FFI requires the exact types of the handler.
  """
  operands = vary_together(*operands)
  # Results vary over the mesh axes of the operands; a bare ShapeDtypeStruct would claim that they
  # are replicated.
  like = jax.typeof(operands[0])
  types = [
    like.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False) for shape, dtype in results
  ]
  call = jax.ffi.ffi_call(target, types, input_output_aliases=aliases)
  return tuple(call(*operands, **attributes))


def call_on_whole_arrays(
  target: str,
  operands: Sequence[Any],
  results: Sequence[tuple[tuple[int, ...], Any]],
  *,
  aliases: dict[int, int] | None = None,
  **attributes: Any,
) -> tuple[jax.Array, ...]:
  """`native_call` for kernels whose operands and results must not be parts of larger arrays.

  From JAX 0.11 on, XLA for GPUs fuses a call with the slices around it. The kernel then accesses
  parts of larger arrays, at any alignment, and in `x.at[:n].set(f(x[:n]))` it overwrites operands
  that other CTAs are still reading. Optimization barriers prevent the fusion.
  """
  operands = lax.optimization_barrier(tuple(operands))
  barred: tuple[jax.Array, ...] = lax.optimization_barrier(
    native_call(target, operands, results, aliases=aliases, **attributes)
  )
  return barred
