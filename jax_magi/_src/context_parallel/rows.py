"""In which form rows travel: as keys and values, or as something that both are made of.

    rows     a rank's arrays `[n, ...]`: (k, v), or others, such as latents
    wire     the same as one array `[n, width]`: what collectives move
    k, v     what kernels take: the rows themselves, or `expand(rows, constants)`

Gradients go the same way back. They come home as rows of float32, and are summed there.
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
from jax_magi._src.context_parallel.schedule import num_parts_of, part_of_rows, steps_of
from jax_magi._src.transforms.closure import OpenFunction


@dataclasses.dataclass(frozen=True, eq=False)
class RowForm:
  """The form of rows.

  Attributes:
    shapes: for each array of rows, the shape of one row.
    dtypes: likewise.
    expand: makes k and v of rows and constants; None where rows are k and v.
  """

  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[np.dtype, ...]
  expand: OpenFunction | None

  @classmethod
  def of(cls, rows: Sequence[Any], expand: OpenFunction | None) -> RowForm:
    """That of these arrays."""
    return cls(tuple(x.shape[1:] for x in rows), tuple(x.dtype for x in rows), expand)

  # --- the wire ---

  def joined(self, rows: Sequence[Any]) -> Any:
    """One array, so that all of a token travels in one collective; not a bit of it changes."""
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
    """float32, of those arrays of rows that can have gradients: of a part of the rows each."""
    columns = (jnp.concatenate(parts) for parts in zip(*gradients, strict=True))
    return jnp.concatenate([_flat(x.astype(np.float32)) for x in columns], axis=1)

  def parted_gradients(self, gradients: Any) -> tuple[Any, ...]:
    """The inverse, in the dtypes of those arrays."""
    parts, begin = [], 0
    for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
      if _has_gradient(dtype):
        end = begin + math.prod(shape)
        parts.append(gradients[:, begin:end].reshape(len(gradients), *shape).astype(dtype))
        begin = end
    return tuple(parts)

  @property
  def _wire_dtype(self) -> np.dtype:
    """That of all rows, or else unsigned integers that all of them are made of."""
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
    """k and v of a stage's rows; `slices` tell which of them matter."""
    if self.expand is None:
      k, v = rows
      return k, v
    k, v = self.expand(without_hidden(rows, seen_rows(slices, rows[0].shape[0])), constants)
    return k, v

  def differentiated(
    self, rows: Sequence[Any], constants: Sequence[Any], slices: Any
  ) -> tuple[tuple[Any, Any], Callable[..., Any]]:
    """The same, and what makes gradients of rows and constants of float32 dk and dv.

    They are those of arrays that can have any; those of constants in float32.
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
  """How many rows there are in a stage, or in a part of one: all that `expand` is called with."""
  lengths = [spec.k_local, *spec.capacities.rows]
  counts = {*lengths, *(spec.capacities.whole_rows or ())}
  if spec.overlap_degree and spec.cp_size > 1:
    num_hops = [len(hops) for hops in spec.capacities.hops]
    _, order = spec.capacities.orders
    steps = steps_of(num_hops, order, is_fetching=not keeps_rows, is_backward=True)
    for step in (step for step in steps if step.stage >= 0):
      num_parts = num_parts_of(steps, step.stage)
      begin, end = part_of_rows(lengths[step.stage], step.part, num_parts)
      counts.add(end - begin)
  return sorted(counts)


def differentiable(arrays: Sequence[Any]) -> list[Any]:
  """Those that can have gradients."""
  return [x for x in arrays if _has_gradient(x.dtype)]


def gradients_of(arrays: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
  """Gradients of `differentiable(arrays)` in their dtypes, with None for the others."""
  given = iter(gradients)
  return tuple(next(given).astype(x.dtype) if _has_gradient(x.dtype) else None for x in arrays)


def _filled(arrays: Sequence[Any], some: Sequence[Any]) -> list[Any]:
  """All of them, with `some` in the place of those that can have gradients."""
  given = iter(some)
  return [next(given) if _has_gradient(x.dtype) else x for x in arrays]


def _has_gradient(dtype: Any) -> bool:
  return bool(jnp.issubdtype(dtype, jnp.inexact))


def _wide(x: Any) -> Any:
  return x.astype(np.promote_types(x.dtype, np.float32))


def _flat(x: Any) -> Any:
  # Not -1: its size is undefined if a part of a stage has no rows.
  return x.reshape(x.shape[0], math.prod(x.shape[1:]))
