"""The public functions of context parallelism."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_magi._src.arguments import check_choice
from jax_magi._src.attention import checks
from jax_magi._src.attention.api import AttnForwardMeta
from jax_magi._src.context_parallel.capacities import Capacities
from jax_magi._src.context_parallel.gathered import attend_gathered, check_order
from jax_magi._src.context_parallel.key import DistAttnKey, with_capacities
from jax_magi._src.context_parallel.rank_call import (
  attend_on_rank,
  check_local_lengths,
  part_of_rank,
)
from jax_magi._src.context_parallel.whole_arrays import Layout, Placed, attend_whole
from jax_magi._src.masks.segments import as_ids


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
  checkpoint_names: str | tuple[str, str] | None = None,
  implementation: str | None = None,
) -> tuple[jax.Array, AttnForwardMeta]:
  """Attention of a rank's queries over the keys of all ranks. Call it inside `shard_map`.

  Args:
    q: `[local, num_q_heads, head_dim]`, the rank's part of dispatched queries.
    k: `[local, num_kv_heads, head_dim]`, the rank's part of dispatched keys.
    v: `[local, num_kv_heads, value_dim]`, the rank's part of dispatched values.
    key: the plan of the mask, passed to `shard_map` with `in_specs=P(axis_name)`.
    axis_name: the mesh axis over which the sequence is split.
    softmax_scale: as in `attention`.
    softcap: as in `attention`.
    sink: as in `attention`, and equal on all ranks. Its gradient is the sum over ranks.
    return_max_logits: whether to return `meta.max_logits`.
    reduce_max_logits: whether `meta.max_logits` is the maximum over all ranks. With False, it is
      that of this rank, and `jax_magi.optim.reduce_max_logits` can reduce all layers at once.
    keep_remote_kv: whether keys and values of other ranks stay in memory until the backward pass.
      With False, the backward pass fetches them again.
    remote_grad_dtype: the dtype in which gradients of keys and values travel. None means float32.
      bfloat16 or float16 halves the bytes, and rounds each row once for each hop. Sums are always
      float32.
    deterministic: as in `attention`.
    sm_margin: the number of streaming multiprocessors that kernels leave to communication, or a
      pair for the forward and backward pass. None takes the environment variables
      MAGI_ATTENTION_FFA_FORWARD_SM_MARGIN and MAGI_ATTENTION_FFA_BACKWARD_SM_MARGIN when the step
      is traced, or 0.
    kernel_barrier: whether a kernel waits, for at most 0.1 ms, until the GPU has started the
      transfer that the kernel overlaps with. The kernel then needs no margin.
    checkpoint_names: as in `attention`.
    implementation: as in `attention`.

  Returns:
    out `[local, num_q_heads, value_dim]`, and `AttnForwardMeta` with lse `[local, num_q_heads]`
    and max_logits `[num_q_heads]`.
  """
  key = part_of_rank("calc_attn", key, axis_name)
  checks.check_qkv(q, k, v)
  check_local_lengths({"q": q}, {"k": k}, key)
  return attend_on_rank(
    q,
    (k, v),
    (k, v),
    key,
    axis_name=axis_name,
    softmax_scale=softmax_scale,
    softcap=softcap,
    sink=sink,
    return_max_logits=return_max_logits,
    reduce_max_logits=reduce_max_logits,
    keep_remote_kv=keep_remote_kv,
    remote_grad_dtype=remote_grad_dtype,
    deterministic=deterministic,
    sm_margin=sm_margin,
    kernel_barrier=kernel_barrier,
    checkpoint_names=checkpoint_names,
    implementation=implementation,
  )


def context_parallel_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  key: DistAttnKey | None = None,
  *,
  segment_ids: Any = None,
  max_segments: int | None = None,
  padding_id: int | None = 0,
  causal: bool = True,
  window: tuple[int | None, int | None] | None = None,
  order: str = "zigzag",
  mesh: Any = None,
  axis_name: str = "cp",
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  sink: jax.Array | None = None,
  return_max_logits: bool = False,
  **options: Any,
) -> tuple[jax.Array, AttnForwardMeta]:
  """Attention under plain `jit`, on whole arrays. It calls `shard_map` itself.

  With a key, this is `calc_attn`: only the needed rows move, while kernels run, and work is
  balanced between ranks. Without a key, nothing is planned on the host: every rank gathers all keys
  and values, and finds the slices of its queries in the compiled step.

  Args:
    q: `[rows, num_q_heads, head_dim]`, or with a leading batch. Rows are in the order of
      `dispatch`; without a key, in the order `order`.
    k: `[rows, num_kv_heads, head_dim]`, or with a leading batch.
    v: `[rows, num_kv_heads, value_dim]`, or with a leading batch.
    key: one plan for the whole batch, or a stack (`stack_keys`) with one for each row. None means
      no plan. Only then, the next six arguments apply.
    segment_ids: int `[rows]`, or with a leading batch, in the order of q: document numbers, as in
      `dot_product_attention`. None means a single document.
    max_segments: as in `dot_product_attention`.
    padding_id: as in `dot_product_attention`.
    causal: whether tokens see only themselves and earlier tokens.
    window: (left, right), as in `AttentionMask.sliding_window`.
    order: the order of rows. In "zigzag", each rank has a block from the front of the sequence and
      one from the back (see `zigzag_positions`). The other one is "contiguous".
    mesh: the mesh with the axes named below. None means the current mesh.
    axis_name: the axis over which the sequence is split.
    batch_axis: the axes over which the batch is split, if it is.
    head_axis: the axes over which heads are split, if they are.
    sink: as in `calc_attn`.
    return_max_logits: as in `calc_attn`. They are `[num_q_heads]`, or `[batch, num_q_heads]`.
    **options: as in `calc_attn`; without a key, those of `attention`, and keep_remote_kv.

  Returns:
    out and meta of whole arrays.
  """
  layout = Layout.of(q, mesh, axis_name, batch_axis, head_axis)
  if key is not None:
    given = {"segment_ids": segment_ids, "max_segments": max_segments, "window": window}
    for name, value in given.items():
      if value is not None:
        raise ValueError(f"{name} cannot be combined with a key, which contains its mask")
    if not causal or order != "zigzag":
      raise ValueError("causal and order cannot be combined with a key, which contains its mask")
    placed = Placed.of_key(key, q, layout)
    layout.check_rows({"k": k, "v": v}, layout.cp_size * key.spec.k_local, has_heads=True)
  else:
    placed = _without_plan(q, k, v, segment_ids, max_segments, order, layout)

  def attend(q: Any, rows: Any, plan: Any, sink: Any) -> Any:
    k, v = rows
    if key is not None:
      return calc_attn(
        q,
        k,
        v,
        plan,
        axis_name=axis_name,
        sink=sink,
        return_max_logits=return_max_logits,
        **options,
      )
    return attend_gathered(
      q,
      k,
      v,
      plan,
      sink,
      axis_name=axis_name,
      order=order,
      max_segments=max_segments,
      padding_id=padding_id,
      causal=causal,
      window=window,
      return_max_logits=return_max_logits,
      **options,
    )

  return attend_whole(
    layout,
    attend,
    q,
    (k, v),
    (layout.with_heads,) * 2,
    placed,
    sink,
    return_max_logits=return_max_logits,
    reduce_max_logits=options.get("reduce_max_logits", True),
  )


def _without_plan(
  q: Any, k: Any, v: Any, segment_ids: Any, max_segments: Any, order: str, layout: Layout
) -> Placed:
  """Places document numbers, or none, that fit q and its mesh."""
  length = int(q.shape[layout.has_batch])
  check_order(order, length, layout.cp_size)
  layout.check_rows({"q": q, "k": k, "v": v}, length, "of q", has_heads=True)
  if segment_ids is None:
    if max_segments is not None:
      raise ValueError("max_segments needs segment_ids")
    return Placed(None, P(), None)
  if max_segments is None:
    raise ValueError("segment_ids needs max_segments, a static bound on the documents of a row")
  ids = as_ids("segment_ids", segment_ids, tuple(q.shape[: 1 + layout.has_batch]))
  return Placed(jnp.asarray(ids), layout.rows, 0 if layout.has_batch else None)


def stack_keys(
  keys: Sequence[DistAttnKey], capacities: Capacities | None = None, *, axis: int = 1
) -> DistAttnKey:
  """Stacks keys of equal lengths, for a batch in which each row has its own mask.

  `jax.vmap(..., in_axes=axis)` then takes one key for each row.

  Args:
    keys: keys that were made with the same arguments, one for each mask.
    capacities: room for all of them, or for other batches too. None means the union of theirs.
    axis: the axis of the batch. With 1, leaves are `[cp_size, batch, ...]`; with 0,
      `[batch, cp_size, ...]`.
  """
  if not keys:
    raise ValueError("keys must hold at least one key")
  check_choice("axis", axis, (0, 1))
  if capacities is None:
    capacities = functools.reduce(operator.or_, (key.capacities for key in keys))
  keys = [with_capacities(key, capacities) for key in keys]
  for i, key in enumerate(keys):
    if key.spec != keys[0].spec:
      raise ValueError(f"keys must have equal shapes, but key 0 is {keys[0]} and key {i} is {key}")
  stack = jax.tree.map(lambda *leaves: np.stack(leaves, axis=axis), *keys)
  return dataclasses.replace(stack, spec=dataclasses.replace(stack.spec, batch_axis=axis))
