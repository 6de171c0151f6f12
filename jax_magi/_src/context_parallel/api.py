"""The public functions of context parallelism."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_magi._src.attention import checks
from jax_magi._src.attention.api import AttnForwardMeta
from jax_magi._src.context_parallel.capacities import Capacities
from jax_magi._src.context_parallel.key import DistAttnKey, with_capacities
from jax_magi._src.context_parallel.rank_call import (
  attend_on_rank,
  check_local_lengths,
  part_of_rank,
)
from jax_magi._src.context_parallel.whole_arrays import Layout, attend_whole


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
    implementation=implementation,
  )


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

  def attend(q: Any, rows: Any, key: Any, sink: Any) -> Any:
    k, v = rows
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

  layout = Layout.of(q, key, mesh, axis_name, batch_axis, head_axis)
  layout.check_rows({"k": k, "v": v}, has_heads=True)
  return attend_whole(
    layout,
    attend,
    q,
    (k, v),
    (layout.with_heads,) * 2,
    key,
    sink,
    return_max_logits=return_max_logits,
    reduce_max_logits=options.get("reduce_max_logits", True),
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
