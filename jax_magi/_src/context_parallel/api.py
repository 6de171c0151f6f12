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
    checkpoint_names: as in `attention`.
    implementation: see above.

  Returns:
    out `[local, num_q_heads, value_dim]`, and `AttnForwardMeta` with the rank's lse and, over all
    ranks, max_logits.
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
  """Attention for plain `jit`, on whole arrays: it wraps `shard_map` itself.

  With a key, it is `calc_attn`. Without one, nothing is planned on the host: every rank gathers all
  keys and values, and finds the slices of its queries in the compiled step. That takes one line and
  any packing of documents; a key moves only the rows that are needed, overlaps moving them with
  kernels, and balances work between documents.

  Args:
    q: `[rows, num_q_heads, head_dim]`, or with a leading batch; rows as `dispatch` returns them, or
      without a key, tokens in the order `order`.
    k: `[rows, num_kv_heads, head_dim]`, or with a leading batch.
    v: `[rows, num_kv_heads, value_dim]`, or with a leading batch.
    key: one for the whole batch, or a stack (`stack_keys`) with one for each row; None is no plan,
      and the next six arguments are for that alone.
    segment_ids: int `[rows]`, or with a leading batch, in the order of q: document numbers as in
      `dot_product_attention`; None is a single document.
    max_segments: as in `dot_product_attention`.
    padding_id: as in `dot_product_attention`.
    causal: whether tokens see only those before them.
    window: (left, right), as in `AttentionMask.sliding_window`.
    order: of rows over ranks: "zigzag", in which each rank has a block from the front and one from
      the back (see `zigzag_positions`), or "contiguous".
    mesh: has the axes named below; None is the current one.
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
        raise ValueError(f"{name} is for attention without a key: a key has its mask")
    if not causal or order != "zigzag":
      raise ValueError("causal and order are for attention without a key: a key has its mask")
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
  """Document numbers, or none, that fit q and its mesh."""
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
  """Keys of equal lengths side by side, for a batch.

  `jax.vmap(..., in_axes=axis)` takes one of them for each row.

  Args:
    keys: made with the same arguments, for one mask each.
    capacities: room for all of them, and perhaps for those of other batches; None is the largest.
    axis: of the batch. With 1, leaves are `[cp_size, batch, ...]`; with 0, `[batch, cp_size, ...]`.
  """
  if not keys:
    raise ValueError("keys must hold at least one key")
  check_choice("axis", axis, (0, 1))
  if capacities is None:
    capacities = functools.reduce(operator.or_, (key.capacities for key in keys))
  keys = [with_capacities(key, capacities) for key in keys]
  for i, key in enumerate(keys):
    if key.spec != keys[0].spec:
      raise ValueError(f"keys must be alike, but 0 is {keys[0]} and {i} is {key}")
  stack = jax.tree.map(lambda *leaves: np.stack(leaves, axis=axis), *keys)
  return dataclasses.replace(stack, spec=dataclasses.replace(stack.spec, batch_axis=axis))
