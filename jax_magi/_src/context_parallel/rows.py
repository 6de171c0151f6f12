"""The form in which rows travel: as keys and values, or as arrays from which both are computed.

    rows     a rank's arrays `[n, ...]`: (k, v), or others, such as latents
    wire     the same as one array `[n, width]`, which collectives move
    k, v     the operands of kernels: the rows themselves, or `expand(rows, constants)`

Gradients go the same way back. They return to the owner as float32 rows, and are summed there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_magi._src.attention.seen_rows import seen_rows, where_rows, without_hidden
from jax_magi._src.context_parallel.capacities import KeySpec
from jax_magi._src.context_parallel.schedule import part_of_rows, steps_of
from jax_magi._src.transforms.closure import OpenFunction


@dataclasses.dataclass(frozen=True, eq=False)
class RowForm:
  """The form of rows.

  Attributes:
    shapes: for each array of rows, the shape of one row.
    dtypes: for each array of rows, its dtype.
    expand: computes k and v from rows and constants. None if the rows are k and v.
  """

  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[np.dtype, ...]
  expand: OpenFunction | None

  @classmethod
  def of(cls, rows: Sequence[Any], expand: OpenFunction | None) -> RowForm:
    """The form of these arrays."""
    return cls(tuple(x.shape[1:] for x in rows), tuple(x.dtype for x in rows), expand)

  # --- the wire ---

  def joined(self, rows: Sequence[Any]) -> Any:
    """Joins the arrays bitwise into one, so that a token travels in one collective."""
    return jnp.concatenate([_flat(self._as_wire(x)) for x in rows], axis=1)

  def parted(self, wire: Any) -> tuple[Any, ...]:
    """The inverse of `joined`, for any number of rows."""
    parts, begin = [], 0
    for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
      ratio = np.dtype(dtype).itemsize // self._wire_dtype.itemsize
      end = begin + math.prod(shape) * ratio
      part, begin = wire[:, begin:end], end
      if dtype != self._wire_dtype:
        part = part.reshape(len(wire), *shape, *([ratio] if ratio > 1 else []))
        part = part != 0 if np.dtype(dtype).kind == "b" else lax.bitcast_convert_type(part, dtype)
      parts.append(part.reshape(len(wire), *shape))
    return tuple(parts)

  def joined_gradients(self, gradients: Sequence[Sequence[Any]]) -> Any:
    """Joins the gradients of the differentiable arrays of parts of the rows, in float32."""
    columns = (jnp.concatenate(parts) for parts in zip(*gradients, strict=True))
    return jnp.concatenate([_flat(x.astype(np.float32)) for x in columns], axis=1)

  def parted_gradients(self, gradients: Any) -> tuple[Any, ...]:
    """The inverse of `joined_gradients`, in the dtypes of the arrays."""
    parts, begin = [], 0
    for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
      if _has_gradient(dtype):
        end = begin + math.prod(shape)
        parts.append(gradients[:, begin:end].reshape(len(gradients), *shape).astype(dtype))
        begin = end
    return tuple(parts)

  @property
  def _wire_dtype(self) -> np.dtype:
    """The common dtype of all arrays, or else an unsigned integer dtype that divides them all."""
    if len(set(self.dtypes)) == 1:
      return self.dtypes[0]
    return np.dtype(f"uint{8 * min(np.dtype(dtype).itemsize for dtype in self.dtypes)}")

  def _as_wire(self, x: Any) -> Any:
    if x.dtype == self._wire_dtype:
      return x
    if x.dtype.kind == "b":
      return x.astype(self._wire_dtype)
    return lax.bitcast_convert_type(x, self._wire_dtype)

  # --- keys and values ---

  def keys_and_values(
    self, rows: Sequence[Any], constants: Sequence[Any], slices: Any
  ) -> tuple[Any, Any]:
    """k and v from a stage's rows. `slices` determine which rows are visible."""
    if self.expand is None:
      k, v = rows
      return k, v
    k, v = self.expand(without_hidden(rows, seen_rows(slices, rows[0].shape[0])), constants)
    return k, v

  def differentiated(
    self, rows: Sequence[Any], constants: Sequence[Any], slices: Any
  ) -> tuple[tuple[Any, Any], Callable[..., Any]]:
    """k and v, and a function from float32 dk and dv to the gradients of rows and constants.

    There is one gradient for each differentiable array. Those of constants are float32.
    """
    expand = self.expand
    if expand is None:
      k, v = rows
      return (k, v), lambda dk, dv: ((dk, dv), ())
    is_seen = seen_rows(slices, rows[0].shape[0])
    rows = without_hidden(rows, is_seen)

    def fun(some_rows: Any, some_constants: Any) -> Any:
      k, v = expand(_filled(rows, some_rows), _filled(constants, some_constants))
      return k, v

    (k, v), vjp = jax.vjp(fun, differentiable(rows), differentiable(constants))

    def pull_back(dk: Any, dv: Any) -> Any:
      gradients, of_constants = vjp((dk.astype(k.dtype), dv.astype(v.dtype)))
      gradients = [where_rows(is_seen, x, jnp.zeros_like(x)) for x in gradients]
      # They may be NaN if no row of the stage is seen.
      is_any = is_seen.any()
      of_constants = [_wide(jnp.where(is_any, x, jnp.zeros_like(x))) for x in of_constants]
      return tuple(gradients), tuple(of_constants)

    return (k, v), pull_back

  def value_like(self, rows: Sequence[Any]) -> Any:
    """The shape `[1, n, num_kv_heads, value_dim]` and dtype of the values of these rows."""
    v = rows[1] if self.expand is None else self.expand.results(rows)[1]
    return jax.ShapeDtypeStruct((1, *v.shape), v.dtype)


def row_counts(spec: KeySpec, *, keeps_rows: bool) -> list[int]:
  """All numbers of rows with which `expand` is called: those of stages and of parts of stages."""
  lengths = [spec.k_local, *spec.capacities.rows]
  counts = {*lengths, *(spec.capacities.whole_rows or ())}
  if spec.overlap_degree and spec.cp_size > 1:
    num_hops = [len(hops) for hops in spec.capacities.hops]
    _, order = spec.capacities.orders
    steps = steps_of(num_hops, order, is_fetching=not keeps_rows, is_backward=True)
    for step in (step for step in steps if step.stage >= 0):
      begin, end = part_of_rows(lengths[step.stage], step.rows)
      counts.add(end - begin)
  return sorted(counts)


def differentiable(arrays: Sequence[Any]) -> list[Any]:
  """The arrays that can have gradients."""
  return [x for x in arrays if _has_gradient(x.dtype)]


def gradients_of(arrays: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
  """Gradients of `differentiable(arrays)` in their dtypes, with None for the others."""
  given = iter(gradients)
  return tuple(next(given).astype(x.dtype) if _has_gradient(x.dtype) else None for x in arrays)


def _filled(arrays: Sequence[Any], some: Sequence[Any]) -> list[Any]:
  """All arrays, with `some` replacing those that can have gradients."""
  given = iter(some)
  return [next(given) if _has_gradient(x.dtype) else x for x in arrays]


def _has_gradient(dtype: Any) -> bool:
  return bool(jnp.issubdtype(dtype, jnp.inexact))


def _wide(x: Any) -> Any:
  return x.astype(np.promote_types(x.dtype, np.float32))


def _flat(x: Any) -> Any:
  # Not -1: its size is undefined if a part of a stage has no rows.
  return x.reshape(x.shape[0], math.prod(x.shape[1:]))
