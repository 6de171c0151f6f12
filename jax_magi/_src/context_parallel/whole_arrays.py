"""Attention of all ranks on whole arrays, in plain `jit`. It calls `shard_map` itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_magi._src.attention.api import AttnForwardMeta
from jax_magi._src.context_parallel.key import check_key
from jax_magi._src.context_parallel.nodes import check_ranks_per_node
from jax_magi._src.transforms.explicit import split_over


@dataclasses.dataclass(frozen=True)
class Layout:
  """How whole arrays are split over a mesh.

  Attributes:
    mesh: the mesh with the axes below.
    axis_name: the axis over which the sequence is split.
    batch_axis: the axes over which the batch is split, if it is.
    head_axis: the axes over which heads are split, if they are.
    has_batch: whether arrays have a leading batch axis.
  """

  mesh: Any
  axis_name: str
  batch_axis: Any
  head_axis: Any
  has_batch: bool

  @classmethod
  def of(cls, q: Any, mesh: Any, axis_name: str, batch_axis: Any, head_axis: Any) -> Layout:
    """Checks queries `[rows, heads, dim]`, or with a leading batch; returns their layout."""
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
    if q.ndim not in (3, 4):
      raise ValueError(
        f"q must be [length, num_heads, head_dim], or with a leading batch, got {list(q.shape)}"
      )
    has_batch = q.ndim == 4
    if batch_axis is not None and not has_batch:
      raise ValueError(f"batch_axis is {batch_axis!r}, but q has no batch: {list(q.shape)}")
    return cls(mesh, axis_name, batch_axis, head_axis, has_batch)

  @property
  def cp_size(self) -> int:
    """The number of ranks over which the sequence is split."""
    return int(self.mesh.shape[self.axis_name])

  @property
  def rows(self) -> P:
    """The PartitionSpec of arrays of rows."""
    return P(*self._batch, self.axis_name)

  @property
  def with_heads(self) -> P:
    """The PartitionSpec of arrays of rows whose next axis is that of heads."""
    return P(*self._batch, self.axis_name, self.head_axis)

  @property
  def _batch(self) -> tuple[Any, ...]:
    return (self.batch_axis,) if self.has_batch else ()

  def check_rows(
    self,
    arrays: Mapping[str, Any],
    length: int,
    whose: str = "that dispatch makes",
    *,
    has_heads: bool,
  ) -> None:
    """Checks arrays of rows, with clearer errors than those of `shard_map`."""
    for name, x in arrays.items():
      if has_heads and x.ndim != 3 + self.has_batch:
        raise ValueError(f"{name} must have as many axes as q, got {list(x.shape)}")
      if x.ndim < 1 + self.has_batch:
        raise ValueError(f"{name} must have rows, and a batch as q has, got {list(x.shape)}")
      if x.shape[self.has_batch] != length:
        raise ValueError(f"{name} must have the {length} rows {whose}, got {list(x.shape)}")
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


@dataclasses.dataclass(frozen=True)
class Placed:
  """The operand that says which keys each query sees: a key, or document numbers.

  Attributes:
    tree: a tree of arrays, or None.
    spec: the PartitionSpec of the arrays.
    batch_axis: the batch axis of the arrays, if each row of the batch has its own; or else None.
  """

  tree: Any
  spec: P
  batch_axis: int | None

  @classmethod
  def of_key(cls, key: Any, q: Any, layout: Layout) -> Placed:
    """A key of all ranks, or a stack of keys, that fits q and its mesh."""
    spec = check_key(key).spec
    check_ranks_per_node(layout.mesh, layout.axis_name, spec.ranks_per_node)
    if layout.cp_size != spec.cp_size:
      raise ValueError(
        f"the key is for cp_size={spec.cp_size}, but the mesh axis {layout.axis_name!r} has size "
        f"{layout.cp_size}"
      )
    layout.check_rows({"q": q}, spec.cp_size * spec.q_local, has_heads=True)
    if np.ndim(key.q_chunks) != 3:
      return cls(key, key.partition_spec(layout.axis_name), None)
    if not layout.has_batch:
      raise ValueError(f"key is a stack of keys, but q has no batch: {list(q.shape)}")
    return cls(key, key.partition_spec(layout.axis_name, layout.batch_axis), spec.batch_axis)


def attend_whole(
  layout: Layout,
  attend: Callable[..., Any],
  q: Any,
  rows: Any,
  row_specs: Any,
  placed: Placed,
  sink: Any,
  constants: Any = (),
  constant_specs: Any = (),
  *,
  return_max_logits: bool,
  reduce_max_logits: bool,
) -> tuple[Any, AttnForwardMeta]:
  """Attention of all ranks.

  Args:
    layout: the layout of q.
    attend: `attend(q, rows, plan, sink, *constants)` for one rank and one row of the batch.
    q: `[cp_size * local, num_q_heads, head_dim]`, or with a leading batch.
    rows: a tree of arrays of rows.
    row_specs: a tree of the PartitionSpecs of `rows`.
    placed: the operand whose part for one rank is `plan`.
    sink: as in `calc_attn`, or None.
    constants: a tuple of the further operands of `attend`.
    constant_specs: the PartitionSpecs of `constants`.
    return_max_logits: as in `calc_attn`.
    reduce_max_logits: must be True if maxima are returned.

  Returns:
    out and meta of whole arrays.
  """
  if return_max_logits and not reduce_max_logits:
    raise ValueError(
      "reduce_max_logits=False needs calc_attn: max_logits here are those of all ranks"
    )
  has_batch, batch_of_plan = layout.has_batch, placed.batch_axis

  def step(q: Any, rows: Any, plan: Any, sink: Any, constants: Any) -> Any:
    def attend_row(q: Any, rows: Any, plan: Any) -> Any:
      return attend(q, rows, plan, sink, *constants)

    if not has_batch:
      return attend_row(q, rows, plan)
    return jax.vmap(attend_row, in_axes=(0, 0, batch_of_plan))(q, rows, plan)

  batch = (layout.batch_axis,) if has_batch else ()
  sink_spec = P() if sink is None else P(*[None] * (np.ndim(sink) - 1), layout.head_axis)
  heads = P(*batch, layout.head_axis) if return_max_logits else None
  meta = AttnForwardMeta(layout.with_heads, heads)  # type: ignore[arg-type]
  operands = (q, rows, placed.tree, sink, constants)
  in_specs = (layout.with_heads, row_specs, placed.spec, sink_spec, constant_specs)
  # Over Explicit axes, shard_map does not reshard its operands.
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
