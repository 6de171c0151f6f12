"""Varying mesh axes: what `shard_map(check_vma=True)` tracks in every array's type."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def varying_axes(x: Any) -> frozenset[str]:
  """The mesh axes over which an array varies."""
  return axes_of_type(jax.typeof(x))


def axes_of_type(aval: Any) -> frozenset[str]:
  """The mesh axes over which arrays of this type vary."""
  axes: frozenset[str] = aval.manual_axis_type.varying
  return axes


def vary_over(x: Any, axes: frozenset[str]) -> jax.Array:
  """Makes `x` vary over these axes, in addition to those over which it varies already."""
  missing = tuple(sorted(axes - varying_axes(x)))
  varying: jax.Array = lax.pcast(x, missing, to="varying") if missing else x
  return varying


def vary_together(*arrays: Any) -> tuple[jax.Array, ...]:
  """Makes all arrays vary over the mesh axes that any of them varies over.

  JAX does this for its own operations. If an array was replicated, autodiff then sums its gradient
  over those axes.
  """
  axes = frozenset().union(*map(varying_axes, arrays))
  return tuple(vary_over(x, axes) for x in arrays)


def vary_like(x: jax.Array, like: jax.Array) -> jax.Array:
  """Makes `x` vary over the mesh axes of `like`, as the initial carry of a loop must."""
  return vary_over(x, varying_axes(like))
