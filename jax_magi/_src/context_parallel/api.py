"""The public functions of context parallelism."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_magi._src.arguments import check_flag
from jax_magi._src.attention import checks
from jax_magi._src.attention.api import AttnForwardMeta
from jax_magi._src.context_parallel.capacities import Capacities
from jax_magi._src.context_parallel.dispatch import check_axis
from jax_magi._src.context_parallel.key import (
  DistAttnKey,
  check_key,
  check_one_key,
  with_capacities,
)
from jax_magi._src.context_parallel.nodes import check_ranks_per_node
from jax_magi._src.context_parallel.ops import RankConfig, rank_attention
from jax_magi._src.context_parallel.sm_margins import sm_margins
from jax_magi._src.transforms.explicit import split_over
from jax_magi._src.transforms.varying import vary_together


def calc_attn(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  key: DistAttnKey,
  *,
  axis_name: str = "cp",
  softmax_scale: float | None = None,
  softcap: float = 0.0,
  sink: jax.Array | None = None,
  return_max_logits: bool = False,
  reduce_max_logits: bool = True,
  keep_remote_kv: bool = False,
  remote_grad_dtype: Any = None,
  deterministic: bool = False,
  sm_margin: int | tuple[int, int] | None = None,
  kernel_barrier: bool = False,
  implementation: str | None = None,
) -> tuple[jax.Array, AttnForwardMeta]:
  """`attention` of a rank's queries over all keys, inside `shard_map` over `axis_name`.

  Args:
    q: `[local, num_q_heads, head_dim]`, the rank's part of what `dispatch` returned.
    k: `[local, num_kv_heads, head_dim]`, likewise.
    v: `[local, num_kv_heads, value_dim]`, likewise.
    key: the mask's plan, passed with `in_specs=P(axis_name)`.
    axis_name: the mesh axis over which the sequence is split.
    softmax_scale: as in `attention`; so softcap, deterministic and implementation.
    softcap: see above.
    sink: as in `attention`, the same on all ranks. Its gradient is the sum over them.
    return_max_logits: whether to fill `meta.max_logits`.
    reduce_max_logits: whether they are the maxima over all ranks. If not, they are this rank's, and
      `jax_magi.optim.reduce_max_logits` reduces those of all layers at once.
    keep_remote_kv: whether other ranks' keys and values stay in memory until the backward pass,
      which otherwise fetches them anew.
    remote_grad_dtype: in what gradients of other ranks' keys and values travel: None is float32;
      bfloat16 (or float16) halves their bytes, and rounds each row once for each hop. Sums are
      float32 in any case.
    deterministic: see above.
    sm_margin: streaming multiprocessors that kernels leave free for communication, or a pair of
      them, forward and backward. None is what the environment says when the step is traced, in
      MAGI_ATTENTION_FFA_FORWARD_SM_MARGIN and MAGI_ATTENTION_FFA_BACKWARD_SM_MARGIN, or else 0.
    kernel_barrier: whether a kernel waits, 0.1 ms at most, until the GPU has taken up the transfer
      that it shall run beside. Then it needs no margin: it begins on the other multiprocessors.
    implementation: see above.

  Returns:
    out `[local, num_q_heads, value_dim]`, and `AttnForwardMeta` with the rank's lse and, over all
    ranks, max_logits.
  """
  key = _part_of_rank(key, axis_name)
  checks.check_qkv(q, k, v)
  _check_local_lengths(q, k, key)
  config = checks.make_config(
    q,
    v,
    softmax_scale=softmax_scale,
    softcap=softcap,
    deterministic=deterministic,
    sm_margin=0,
    implementation=implementation,
  )
  keep = check_flag("keep_remote_kv", keep_remote_kv)
  q, config = config.with_positive_scale(q)
  sink = checks.sink_logit(sink, q.shape[1])
  leaves, treedef = jax.tree.flatten(key)
  # Before the custom derivative, so that the gradient of a replicated operand is summed.
  q, k, v, sink, *leaves = vary_together(q, k, v, jnp.asarray(sink), *map(jnp.asarray, leaves))
  forward, backward = (dataclasses.replace(config, sm_margin=x) for x in sm_margins(sm_margin))
  with_barrier = check_flag("kernel_barrier", kernel_barrier)
  asks_max_logits = check_flag("return_max_logits", return_max_logits)
  is_reduced = check_flag("reduce_max_logits", reduce_max_logits) and asks_max_logits
  grad_dtype = _check_grad_dtype(remote_grad_dtype)
  rank_config = RankConfig(forward, backward, axis_name, keep, with_barrier, is_reduced, grad_dtype)
  out, lse, max_logits = rank_attention(
    rank_config, q, k, v, jax.tree.unflatten(treedef, leaves), sink
  )
  if not asks_max_logits:
    return out, AttnForwardMeta(lse)
  return out, AttnForwardMeta(lse, lax.stop_gradient(max_logits))


def context_parallel_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  key: DistAttnKey,
  *,
  mesh: Any = None,
  axis_name: str = "cp",
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  sink: jax.Array | None = None,
  return_max_logits: bool = False,
  **options: Any,
) -> tuple[jax.Array, AttnForwardMeta]:
  """`calc_attn` for plain `jit`, on whole arrays: it wraps `shard_map` itself.

  Args:
    q: `[cp_size * local, num_q_heads, head_dim]` as `dispatch` returns it, or with a leading batch.
    k: `[cp_size * local, num_kv_heads, head_dim]`, or with a leading batch.
    v: `[cp_size * local, num_kv_heads, value_dim]`, or with a leading batch.
    key: one for the whole batch, or a stack (`stack_keys`) with one for each row.
    mesh: has the axes named below; None is the current one.
    axis_name: the axis over which the sequence is split.
    batch_axis: the axes over which the batch is split, if it is.
    head_axis: the axes over which heads are split, if they are.
    sink: as in `calc_attn`.
    return_max_logits: as in `calc_attn`. They are `[num_q_heads]`, or `[batch, num_q_heads]`.
    **options: as in `calc_attn`.

  Returns:
    out and meta of whole arrays.
  """
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
  if return_max_logits and not options.get("reduce_max_logits", True):
    raise ValueError(
      "reduce_max_logits=False is for calc_attn: whole arrays have the maxima of all"
    )
  has_batch = q.ndim == 4
  if q.ndim not in (3, 4):
    raise ValueError(
      f"q must be [length, num_heads, head_dim], or with a leading batch, got {list(q.shape)}"
    )
  if batch_axis is not None and not has_batch:
    raise ValueError(f"batch_axis is {batch_axis!r}, but q has no batch: {list(q.shape)}")
  _check_whole_arrays(q, k, v, key, mesh, axis_name, batch_axis, head_axis)
  is_stack = np.ndim(key.q_chunks) == 3
  if is_stack and not has_batch:
    raise ValueError(f"key is a stack of keys, but q has no batch: {list(q.shape)}")
  batch = (batch_axis,) if has_batch else ()

  def step(
    q: jax.Array, k: jax.Array, v: jax.Array, key: DistAttnKey, sink: Any
  ) -> tuple[jax.Array, AttnForwardMeta]:
    def attend(
      q: jax.Array, k: jax.Array, v: jax.Array, key: DistAttnKey
    ) -> tuple[jax.Array, AttnForwardMeta]:
      return calc_attn(
        q,
        k,
        v,
        key,
        axis_name=axis_name,
        sink=sink,
        return_max_logits=return_max_logits,
        **options,
      )

    if not has_batch:
      return attend(q, k, v, key)
    return jax.vmap(attend, in_axes=(0, 0, 0, 1 if is_stack else None))(q, k, v, key)

  rows = P(*batch, axis_name, head_axis)
  key_spec = P(axis_name, batch_axis) if is_stack else P(axis_name)
  sink_spec = P() if sink is None else P(*[None] * (np.ndim(sink) - 1), head_axis)
  meta = AttnForwardMeta(rows, P(*batch, head_axis) if return_max_logits else None)  # type: ignore[arg-type]
  operands, in_specs = (q, k, v, key, sink), (rows, rows, rows, key_spec, sink_spec)
  # Over Explicit axes, shard_map moves nothing by itself.
  operands = tuple(
    jax.tree.map(lambda x, s=spec: split_over(x, mesh, s), operand)
    for operand, spec in zip(operands, in_specs, strict=True)
  )
  return jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(rows, meta))(*operands)


def _check_whole_arrays(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  key: DistAttnKey,
  mesh: Any,
  axis_name: str,
  batch_axis: Any,
  head_axis: Any,
) -> None:
  """What `shard_map` would refuse in its own words, and a batch without rows."""
  spec = key.spec
  if mesh.shape[axis_name] != spec.cp_size:
    raise ValueError(
      f"the key is for cp_size={spec.cp_size}, but the mesh axis {axis_name!r} has size "
      f"{mesh.shape[axis_name]}"
    )

  def parts(axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return math.prod(mesh.shape[name] for name in names)

  sides = (("q", q, spec.q_local), ("k", k, spec.k_local), ("v", v, spec.k_local))
  for name, x, local in sides:
    if x.ndim != q.ndim:
      raise ValueError(f"{name} must have as many axes as q, got {list(x.shape)}")
    length, heads, _ = x.shape[-3:]
    if length != spec.cp_size * local:
      raise ValueError(
        f"{name} must have the {spec.cp_size * local} rows that dispatch makes, got {list(x.shape)}"
      )
    if heads % parts(head_axis):
      raise ValueError(
        f"{name}'s {heads} heads must be a multiple of the {parts(head_axis)} devices along "
        f"head_axis={head_axis!r}"
      )
    if x.ndim == 4 and (x.shape[0] == 0 or x.shape[0] % parts(batch_axis)):
      raise ValueError(
        f"{name}'s batch must be a positive multiple of the {parts(batch_axis)} devices along "
        f"batch_axis={batch_axis!r}, got {list(x.shape)}"
      )


def stack_keys(keys: Sequence[DistAttnKey], capacities: Capacities | None = None) -> DistAttnKey:
  """Keys of equal lengths side by side, for a batch: leaves `[cp_size, batch, ...]`.

  `jax.vmap(..., in_axes=1)` takes one of them for each row.

  Args:
    keys: made with the same arguments, for one mask each.
    capacities: room for all of them, and perhaps for those of other batches; None is the largest.
  """
  if not keys:
    raise ValueError("keys must hold at least one key")
  if capacities is None:
    capacities = functools.reduce(operator.or_, (key.capacities for key in keys))
  keys = [with_capacities(key, capacities) for key in keys]
  for i, key in enumerate(keys):
    if key.spec != keys[0].spec:
      raise ValueError(f"keys must be alike, but 0 is {keys[0]} and {i} is {key}")
  return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *keys)


def _check_grad_dtype(dtype: Any) -> np.dtype:
  """In what gradients travel."""
  choices = [np.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16)]
  try:
    found = choices[0] if dtype is None else np.dtype(dtype)
  except TypeError:
    found = None
  if found not in choices:
    names = ", ".join(x.name for x in choices)
    raise ValueError(f"remote_grad_dtype must be None or one of {names}, got {dtype!r}")
  return found


def _part_of_rank(key: Any, axis_name: str) -> DistAttnKey:
  """The rank's part of a key: leaves with a leading axis of 1."""
  size = check_axis("calc_attn", check_key(key), axis_name)
  if key.spec.transport in ("two_level", "ragged"):
    if axis_name not in jax.sharding.get_abstract_mesh().manual_axes:
      raise NotImplementedError(
        f"transport={key.spec.transport!r} needs shard_map: {axis_name!r} is an axis of jax.vmap, "
        "for which JAX lacks its collectives; 'all_to_all' and 'all_gather' work there"
      )
  num_ranks = np.shape(check_one_key(key).q_chunks)[0]
  if num_ranks == 1:
    return key
  if num_ranks != size:
    raise ValueError(f"key must have leaves of {size} ranks or of one, got {num_ranks}")
  # One for all ranks, closed over or replicated: each takes its own part.
  rank = lax.axis_index(axis_name)
  return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(jnp.asarray(x), rank, 1), key)


def _check_local_lengths(q: Any, k: Any, key: DistAttnKey) -> None:
  spec = key.spec
  for name, x, local, length in (
    ("q", q, spec.q_local, spec.q_len),
    ("k", k, spec.k_local, spec.k_len),
  ):
    if x.shape[0] != local:
      raise ValueError(
        f"{name} must have the {local} rows of a rank (the key's mask has {length} over "
        f"{spec.cp_size} ranks; see dispatch), got {list(x.shape)}"
      )
