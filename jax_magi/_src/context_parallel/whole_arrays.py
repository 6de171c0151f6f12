"""Attention of all ranks on whole arrays, in plain `jit`: it wraps `shard_map` itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_magi._src.attention.api import AttnForwardMeta
from jax_magi._src.context_parallel.key import DistAttnKey, check_key
from jax_magi._src.context_parallel.nodes import check_ranks_per_node
from jax_magi._src.transforms.explicit import split_over


@dataclasses.dataclass(frozen=True)
class Layout:
  """How whole arrays lie on a mesh.

  Attributes:
    key: of all ranks, or a stack of keys.
    mesh: has the axes below.
    axis_name: over which the sequence is split.
    batch_axis: over which the batch is split, if it is.
    head_axis: over which heads are split, if they are.
    has_batch: whether arrays have a leading batch.
  """

  key: DistAttnKey
  mesh: Any
  axis_name: str
  batch_axis: Any
  head_axis: Any
  has_batch: bool

  @classmethod
  def of(
    cls, q: Any, key: Any, mesh: Any, axis_name: str, batch_axis: Any, head_axis: Any
  ) -> Layout:
    """That of queries `[cp_size * local, heads, dim]`, or with a leading batch, checked."""
    check_key(key)
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
      raise ValueError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}")
    for axes in (axis_name, batch_axis, head_axis):
      for axis in axes if isinstance(axes, tuple) else (axes,):
        if axis is not None and axis not in mesh.axis_names:
          raise ValueError(
            f"the mesh must have an axis {axis!r}, got {mesh.axis_names}; give mesh=, or set one "
            "with jax.set_mesh"
          )
    check_ranks_per_node(mesh, axis_name, key.spec.ranks_per_node)
    if q.ndim not in (3, 4):
      raise ValueError(
        f"q must be [length, num_heads, head_dim], or with a leading batch, got {list(q.shape)}"
      )
    has_batch = q.ndim == 4
    if batch_axis is not None and not has_batch:
      raise ValueError(f"batch_axis is {batch_axis!r}, but q has no batch: {list(q.shape)}")
    if mesh.shape[axis_name] != key.spec.cp_size:
      raise ValueError(
        f"the key is for cp_size={key.spec.cp_size}, but the mesh axis {axis_name!r} has size "
        f"{mesh.shape[axis_name]}"
      )
    layout = cls(key, mesh, axis_name, batch_axis, head_axis, has_batch)
    layout._check("q", q, key.spec.q_local, has_heads=True)
    if layout.is_stack and not has_batch:
      raise ValueError(f"key is a stack of keys, but q has no batch: {list(q.shape)}")
    return layout

  @property
  def is_stack(self) -> bool:
    """Whether there is a key for each row of the batch."""
    return np.ndim(self.key.q_chunks) == 3

  @property
  def rows(self) -> P:
    """Of arrays of rows."""
    return P(*self._batch, self.axis_name)

  @property
  def with_heads(self) -> P:
    """Of arrays of rows, whose next axis is that of heads."""
    return P(*self._batch, self.axis_name, self.head_axis)

  @property
  def _batch(self) -> tuple[Any, ...]:
    return (self.batch_axis,) if self.has_batch else ()

  def check_rows(self, arrays: Mapping[str, Any], *, has_heads: bool) -> None:
    """What `shard_map` would refuse in its own words, and a batch without rows."""
    for name, x in arrays.items():
      if has_heads and x.ndim != 3 + self.has_batch:
        raise ValueError(f"{name} must have as many axes as q, got {list(x.shape)}")
      if x.ndim < 1 + self.has_batch:
        raise ValueError(f"{name} must have rows, and a batch as q has, got {list(x.shape)}")
      self._check(name, x, self.key.spec.k_local, has_heads=has_heads)

  def _check(self, name: str, x: Any, local: int, *, has_heads: bool) -> None:
    length = self.key.spec.cp_size * local
    if x.shape[self.has_batch] != length:
      raise ValueError(
        f"{name} must have the {length} rows that dispatch makes, got {list(x.shape)}"
      )
    if has_heads and x.shape[-2] % self._parts(self.head_axis):
      raise ValueError(
        f"{name}'s {x.shape[-2]} heads must be a multiple of the {self._parts(self.head_axis)} "
        f"devices along head_axis={self.head_axis!r}"
      )
    parts = self._parts(self.batch_axis)
    if self.has_batch and (x.shape[0] == 0 or x.shape[0] % parts):
      raise ValueError(
        f"{name}'s batch must be a positive multiple of the {parts} devices along "
        f"batch_axis={self.batch_axis!r}, got {list(x.shape)}"
      )

  def _parts(self, axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return math.prod(self.mesh.shape[name] for name in names)


def attend_whole(
  layout: Layout,
  attend: Callable[..., Any],
  q: Any,
  rows: Any,
  row_specs: Any,
  key: DistAttnKey,
  sink: Any,
  constants: Any = (),
  constant_specs: Any = (),
  *,
  return_max_logits: bool,
  reduce_max_logits: bool,
) -> tuple[Any, AttnForwardMeta]:
  """Attention of all ranks.

  Args:
    layout: of q.
    attend: `attend(q, rows, key, sink, *constants)` of one rank and one row of the batch.
    q: `[cp_size * local, num_q_heads, head_dim]`, or with a leading batch.
    rows: a tree of arrays of rows.
    row_specs: a tree of their PartitionSpecs.
    key: as in `layout`.
    sink: as in `calc_attn`, or None.
    constants: a tuple of what else `attend` takes.
    constant_specs: their PartitionSpecs.
    return_max_logits: as in `calc_attn`.
    reduce_max_logits: must be True where maxima are returned.

  Returns:
    out and meta of whole arrays.
  """
  if return_max_logits and not reduce_max_logits:
    raise ValueError(
      "reduce_max_logits=False is for calc_attn: whole arrays have the maxima of all"
    )
  has_batch = layout.has_batch

  def step(q: Any, rows: Any, key: Any, sink: Any, constants: Any) -> Any:
    def attend_row(q: Any, rows: Any, key: Any) -> Any:
      return attend(q, rows, key, sink, *constants)

    if not has_batch:
      return attend_row(q, rows, key)
    return jax.vmap(attend_row, in_axes=(0, 0, 1 if layout.is_stack else None))(q, rows, key)

  batch = (layout.batch_axis,) if has_batch else ()
  key_spec = P(layout.axis_name, layout.batch_axis) if layout.is_stack else P(layout.axis_name)
  sink_spec = P() if sink is None else P(*[None] * (np.ndim(sink) - 1), layout.head_axis)
  heads = P(*batch, layout.head_axis) if return_max_logits else None
  meta = AttnForwardMeta(layout.with_heads, heads)  # type: ignore[arg-type]
  operands = (q, rows, key, sink, constants)
  in_specs = (layout.with_heads, row_specs, key_spec, sink_spec, constant_specs)
  # Over Explicit axes, shard_map moves nothing by itself.
  operands = jax.tree.map(
    lambda spec, operand: jax.tree.map(lambda x: split_over(x, layout.mesh, spec), operand),
    in_specs,
    operands,
    is_leaf=lambda x: isinstance(x, P),
  )
  fun = jax.shard_map(
    step, mesh=layout.mesh, in_specs=in_specs, out_specs=(layout.with_heads, meta)
  )
  return fun(*operands)
