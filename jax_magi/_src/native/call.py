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
  """Calls the handler that the platform has under `target`.

  Args:
    target: its name.
    operands: arrays.
    results: shape and dtype of each.
    aliases: operands, by index, whose memory a result may take.
    **attributes: numpy scalars and bools: the FFI takes no other type than the handler's own.
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
  """`native_call` for kernels whose operands and results must be arrays of their own.

  XLA for GPUs, from JAX 0.11 on, makes one fusion of a call and the slices around it: operands are
  then read, and results written, where they lie in larger arrays, at any alignment, and
  `x.at[:n].set(f(x[:n]))` writes over what other blocks of threads still read. It does not look
  through barriers.
  """
  operands = lax.optimization_barrier(tuple(operands))
  barred: tuple[jax.Array, ...] = lax.optimization_barrier(
    native_call(target, operands, results, aliases=aliases, **attributes)
  )
  return barred
