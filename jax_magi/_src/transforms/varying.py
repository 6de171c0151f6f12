"""Varying mesh axes: what `shard_map(check_vma=True)` tracks in every array's type."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def _axes(x: Any) -> frozenset[str]:
  axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
  return axes


def _vary(x: Any, axes: frozenset[str]) -> jax.Array:
  missing = tuple(sorted(axes - _axes(x)))
  varying: jax.Array = lax.pcast(x, missing, to="varying") if missing else x
  return varying


def vary_together(*arrays: Any) -> tuple[jax.Array, ...]:
  """Makes all arrays vary over the mesh axes that any of them varies over.

  JAX does this for its own operations. Where an array was replicated, autodiff then sums its
  gradient over those axes.
  """
  axes = frozenset().union(*map(_axes, arrays))
  return tuple(_vary(x, axes) for x in arrays)


def vary_like(x: jax.Array, like: jax.Array) -> jax.Array:
  """Makes `x` vary over the mesh axes of `like`: a loop's initial carry must, to match the rest."""
  return _vary(x, _axes(like))
