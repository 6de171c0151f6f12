"""The public functions of context parallelism that exchange latents instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_magi._src.attention.api import AttnForwardMeta
from jax_magi._src.attention.latent import check_kv, latent_leaves
from jax_magi._src.context_parallel.key import DistAttnKey, check_key
from jax_magi._src.context_parallel.rank_call import (
  attend_on_rank,
  check_local_lengths,
  part_of_rank,
  vary_all,
)
from jax_magi._src.context_parallel.rows import row_counts
from jax_magi._src.context_parallel.whole_arrays import Layout, Placed, attend_whole
from jax_magi._src.transforms.closure import OpenFunction, open_closure
from jax_magi._src.transforms.explicit import on_explicit_axes
from jax_magi._src.transforms.varying import vary_like, varying_axes


def calc_latent_attn(
  q: jax.Array,
  latent: Any,
  key: DistAttnKey,
  *,
  expand: Callable[[Any], tuple[jax.Array, jax.Array]],
  axis_name: str = "cp",
  **options: Any,
) -> tuple[jax.Array, AttnForwardMeta]:
  """`calc_attn` in which ranks exchange latents and expand them to keys and values.

  Each stage fetches rows of `latent`, expands them and attends. The backward pass does the same
  again, so keys and values of a layer do not stay in memory.

  Args:
    q: `[local, num_q_heads, head_dim]`, the rank's part of dispatched queries.
    latent: an array `[local, ...]` or a tree of arrays, the rank's part of dispatched latents. All
      arrays travel unchanged in one collective, whatever their dtypes. Integers, such as positions,
      have no gradient.
    key: the plan of the mask, passed to `shard_map` with `in_specs=P(axis_name)`.
    expand: for any n rows of `latent`, `expand(rows)` returns k `[n, num_kv_heads, head_dim]` and v
      `[n, num_kv_heads, value_dim]`. Each row depends only on the same row of `rows`. `expand` must
      be differentiable, and may close over parameters, which have gradients. Rows that no query
      sees are replaced by one that is seen before `expand` is called.
    axis_name: the mesh axis over which the sequence is split.
    **options: as in `calc_attn`. With `keep_remote_kv=True`, other ranks' latents stay in memory
      until the backward pass.

  Returns:
    out and meta, as `calc_attn`.
  """
  key = part_of_rank("calc_latent_attn", key, axis_name)
  leaves, treedef = latent_leaves(latent)
  check_local_lengths({"q": q}, {"latent": leaves[0]}, key)
  keeps = options.get("keep_remote_kv", False)
  # With the types that they have when `expand` is called.
  q, leaves, key = vary_all((q, leaves, key))
  for _ in range(2):
    function, constants = _opened(expand, leaves, treedef, row_counts(key.spec, keeps_rows=keeps))
    before = varying_axes(q)
    q, leaves, key, *_ = vary_all((q, leaves, key, constants))
    if varying_axes(q) == before:
      break  # Otherwise trace again: `expand` closes over arrays that vary over more axes.
  for x in (*leaves, *constants):
    if on_explicit_axes(x):
      raise NotImplementedError(
        "latent and what expand closes over cannot lie on Explicit mesh axes inside shard_map: "
        "make them manual (axis_names=), or Auto"
      )
  kv_like = function.results(leaves)
  check_kv(q, kv_like, leaves[0].shape[0])
  return attend_on_rank(
    q,
    leaves,
    kv_like,
    key,
    axis_name=axis_name,
    expand=function,
    constants=constants,
    **options,
  )


def _opened(
  expand: Any, leaves: Any, treedef: Any, counts: Any
) -> tuple[OpenFunction, tuple[Any, ...]]:
  """`expand` as a function of a list of arrays, traced for these numbers of rows; its constants."""

  def rows_of(count: int) -> list[Any]:
    return [vary_like(jnp.zeros((count, *x.shape[1:]), x.dtype), x) for x in leaves]

  def fun(*leaves: Any) -> Any:
    return expand(jax.tree.unflatten(treedef, leaves))

  return open_closure(fun, [rows_of(count) for count in counts])


def context_parallel_latent_attention(
  q: jax.Array,
  latent: Any,
  key: DistAttnKey,
  *,
  expand: Callable[..., tuple[jax.Array, jax.Array]],
  params: Any = None,
  param_specs: Any = None,
  mesh: Any = None,
  axis_name: str = "cp",
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  sink: jax.Array | None = None,
  return_max_logits: bool = False,
  **options: Any,
) -> tuple[jax.Array, AttnForwardMeta]:
  """`calc_latent_attn` under plain `jit`, on whole arrays. It calls `shard_map` itself.

  Args:
    q: `[cp_size * local, num_q_heads, head_dim]` as `dispatch` returns it, or with a leading batch.
    latent: an array `[cp_size * local, ...]`, or a tree of them, with a batch if q has one.
    key: one plan for the whole batch, or a stack (`stack_keys`) with one for each row.
    expand: as in `calc_latent_attn`. With `params`, it is called as `expand(rows, params)`.
    params: a tree of arrays for `expand`. Use it if heads are split, and each device needs the
      parameters of its own heads. What `expand` closes over is the same on all devices.
    param_specs: a tree of PartitionSpecs for `params`, or one for all. None means `P()`.
    mesh: the mesh with the axes named below. None means the current mesh.
    axis_name: the axis over which the sequence is split.
    batch_axis: the axes over which the batch is split, if it is.
    head_axis: the axes over which heads of q are split, if they are. Latents are not.
    sink: as in `calc_attn`.
    return_max_logits: as in `calc_attn`. They are `[num_q_heads]`, or `[batch, num_q_heads]`.
    **options: as in `calc_latent_attn`.

  Returns:
    out and meta of whole arrays.
  """
  check_key(key)
  layout = Layout.of(q, mesh, axis_name, batch_axis, head_axis)
  placed = Placed.of_key(key, q, layout)
  leaves, _ = latent_leaves(latent)
  named = {f"latent {i}": x for i, x in enumerate(leaves)}
  layout.check_rows(named, layout.cp_size * key.spec.k_local, has_heads=False)

  def attend(q: Any, latent: Any, key: Any, sink: Any, *params: Any) -> Any:
    return calc_latent_attn(
      q,
      latent,
      key,
      expand=lambda rows: expand(rows, *params),
      axis_name=axis_name,
      sink=sink,
      return_max_logits=return_max_logits,
      **options,
    )

  has_params = params is not None
  return attend_whole(
    layout,
    attend,
    q,
    latent,
    layout.rows,
    placed,
    sink,
    (params,) if has_params else (),
    (jax.sharding.PartitionSpec() if param_specs is None else param_specs,) if has_params else (),
    return_max_logits=return_max_logits,
    reduce_max_logits=options.get("reduce_max_logits", True),
  )
