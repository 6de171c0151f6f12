"""Explicit mesh axes, JAX's default: shardings that are part of every array's type."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

Result = TypeVar("Result")


def spec_of(*arrays: Any) -> P:
  """The PartitionSpec of the first array that Explicit axes split, or else of the first array."""
  specs: list[P] = [jax.typeof(x).sharding.spec for x in arrays]
  return next((spec for spec in specs if any(spec)), specs[0])


def on_explicit_axes(x: Any) -> bool:
  """Whether an array is on a mesh that has Explicit axes in this context."""
  return bool(_explicit_axes(jax.typeof(x).sharding.mesh))


def merged_spec(*arrays: Any) -> P:
  """The spec of the shape to which arrays of equal rank are broadcast; earlier arrays win."""
  entries: list[Any] = [None] * len(spec_of(arrays[0]))
  taken: set[str] = set()
  for spec in map(spec_of, arrays):
    for i, entry in enumerate(spec):
      names = _names(entry)
      if entries[i] is None and names and taken.isdisjoint(names):
        entries[i] = entry
        taken.update(names)
  return P(*entries)


def with_auto_axes(
  fun: Callable[..., Result], operands: Any, out_specs: Callable[[], Any]
) -> Callable[..., Result]:
  """Wraps `fun` for meshes with Explicit axes: inside it, XLA propagates the shardings.

  Under `shard_map`, JAX cannot differentiate the wrapped function. An op with a custom derivative
  therefore wraps the functions inside its rules, not itself.

  Args:
    fun: a function of `operands`, or of other arrays on the same mesh.
    operands: any tree. The first array in it that is on Explicit axes determines the mesh.
    out_specs: returns the tree of PartitionSpecs of the results. It is called only if there is such
      a mesh.
  """
  meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands))
  mesh = next((mesh for mesh in meshes if _explicit_axes(mesh)), None)
  if mesh is None:
    return fun
  wrapped = jax.sharding.auto_axes(fun, axes=_explicit_axes(mesh), out_sharding=out_specs())

  def call(*operands: Any) -> Any:
    # The mesh of an array may differ from the current mesh.
    with jax.sharding.use_abstract_mesh(mesh):
      return wrapped(*operands)

  return call


def split_over(x: Any, mesh: Any, spec: P) -> Any:
  """`x`, split by `spec` over the Explicit axes of a mesh. XLA handles the other axes."""
  explicit = _explicit_axes(mesh)
  if not explicit:
    return x

  kept = (tuple(name for name in _names(entry) if name in explicit) or None for entry in spec)
  return reshard(x, NamedSharding(mesh, P(*kept)))


def unsplit(x: Any) -> Any:
  """`x`, replicated on every device. For small arrays that are sliced and concatenated."""
  return split_over(x, jax.typeof(x).sharding.mesh, P()) if any(spec_of(x)) else x


def fold_leading(x: Any, count: int) -> jax.Array:
  """Merges the first `count` axes into one, split over all mesh axes that split any of them."""
  spec, shape = spec_of(x), (math.prod(x.shape[:count]), *x.shape[count:])
  names = tuple(name for entry in spec[:count] for name in _names(entry))
  return reshaped(x, shape, P(names or None, *spec[count:]))


def reshaped(x: Any, shape: tuple[int, ...], spec: P) -> jax.Array:
  """`x` in another shape. JAX needs the spec if Explicit axes split the reshaped axes."""
  result: jax.Array = with_auto_axes(lambda x: x.reshape(shape), x, lambda: spec)(x)
  return result


def resized_spec(x: Any, length: int) -> P:
  """The spec of `x` with a first axis of `length`, which stays whole if it cannot be split."""
  sharding = jax.typeof(x).sharding
  first, *rest = sharding.spec
  parts = math.prod(sharding.mesh.shape[name] for name in _names(first))
  return P(None if length % parts else first, *rest)


def _names(entry: Any) -> tuple[str, ...]:
  """The mesh axes that an entry of a PartitionSpec names."""
  if entry is None:
    return ()
  return entry if isinstance(entry, tuple) else (entry,)


def _explicit_axes(mesh: Any) -> tuple[str, ...]:
  kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return tuple(name for name, kind in kinds if kind == AxisType.Explicit)
