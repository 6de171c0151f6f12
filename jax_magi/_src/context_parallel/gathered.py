"""Attention without a plan: each rank gathers all keys, and computes its slices in the step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_magi._src.arguments import check_choice, check_flag, check_length
from jax_magi._src.attention.api import AttnForwardMeta, attention
from jax_magi._src.attention.checks import check_checkpoint_names, sink_logit
from jax_magi._src.context_parallel import assignment
from jax_magi._src.masks.constructors import checked_segment_ids
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.masks.segments import everything_if

ORDERS = ("zigzag", "contiguous")
_NAMES = ("segment_ids", "segment_ids")


def zigzag_positions(length: int, cp_size: int) -> np.ndarray:
  """The position of each row in the sequence, int32 `[length]`, in the order "zigzag".

  The sequence is cut into `2 * cp_size` blocks. Rank r has block r from the front and block r from
  the back. `x[:, zigzag_positions(...)]` brings `[batch, length]` into this order, and `np.argsort`
  of the positions inverts it. The positions also serve for rotary embeddings. Keys with
  `dispatch="zigzag"` and MaxText's load-balanced context parallelism use the same order.
  """
  check_length("length", length)
  if check_length("cp_size", cp_size) == 0 or length % (2 * cp_size):
    raise ValueError(f"length must be a multiple of 2 * cp_size = {2 * cp_size}, got {length}")
  return (
    np.arange(length, dtype=np.int32)
    .reshape(2 * cp_size, -1)[_blocks("zigzag", cp_size).ravel()]
    .ravel()
  )


def _blocks(order: str, cp_size: int) -> np.ndarray:
  """int32 `[cp_size, blocks]`: the blocks of the sequence that each rank holds."""
  if order == "contiguous":
    return np.arange(cp_size, dtype=np.int32)[:, None]
  ranks = assignment.zigzag(2 * cp_size, cp_size)
  return np.argsort(ranks, kind="stable").reshape(cp_size, 2).astype(np.int32)


def check_order(order: str, length: int, cp_size: int) -> str:
  """Checks that the sequence can be cut into equal blocks in this order."""
  check_choice("order", order, ORDERS)
  multiple = _blocks(order, cp_size).size
  if length == 0 or length % multiple:
    raise ValueError(
      f"q must have a positive multiple of {multiple} rows for order={order!r} on {cp_size} ranks, "
      f"got {length}"
    )
  return order


def attend_gathered(
  q: Any,
  k: Any,
  v: Any,
  segment_ids: Any,
  sink: Any,
  *,
  axis_name: str,
  order: str,
  max_segments: Any,
  padding_id: Any,
  causal: Any,
  window: Any,
  keep_remote_kv: Any = False,
  reduce_max_logits: bool = True,
  return_max_logits: bool = False,
  **options: Any,
) -> tuple[Any, AttnForwardMeta]:
  """Attention of a rank's queries over all keys, inside `shard_map`.

  Args:
    q: `[local, num_q_heads, head_dim]`, rows in the order `order`.
    k: `[local, num_kv_heads, head_dim]`, rows in the order `order`.
    v: `[local, num_kv_heads, value_dim]`, rows in the order `order`.
    segment_ids: int32 `[local]`, or None for a single document.
    sink: as in `attention`.
    axis_name: the mesh axis.
    order: one of `ORDERS`.
    max_segments: as in `AttentionMask.from_segment_ids`.
    padding_id: as in `AttentionMask.from_segment_ids`.
    causal: as in `AttentionMask.from_segment_ids`.
    window: as in `AttentionMask.from_segment_ids`.
    keep_remote_kv: whether all keys stay in memory until the backward pass.
    reduce_max_logits: whether maxima are reduced over all ranks.
    return_max_logits: whether to return maxima.
    **options: as in `attention`.

  Returns:
    out and meta of the rank.
  """
  cp_size = lax.axis_size(axis_name)
  blocks = _blocks(order, cp_size)
  own = jnp.asarray(blocks)[lax.axis_index(axis_name)]

  def attend(q: Any, k: Any, v: Any, segment_ids: Any, sink: Any) -> Any:
    k, v = (_in_sequence(_gather(x, axis_name), blocks) for x in (k, v))
    if segment_ids is None:
      mask = _one_document(k.shape[0], causal, window)
    else:
      ids = _in_sequence(lax.all_gather(segment_ids, axis_name, tiled=True), blocks)
      slices, is_broken = checked_segment_ids(
        ids, max_segments, padding_id=padding_id, causal=causal, window=window, names=_NAMES
      )
      slices = everything_if(is_broken, slices, len(ids), len(ids))
      mask = AttentionMask(slices, len(ids), len(ids))
      # A NaN sink makes the whole row NaN.
      sink = sink_logit(sink, q.shape[1]) + jnp.where(is_broken, np.float32(np.nan), 0.0)
    mask = _rows_of(mask, own, q.shape[0])
    out, meta = attention(q, k, v, mask, sink=sink, return_max_logits=return_max_logits, **options)
    return out, meta.lse, meta.max_logits

  if not check_flag("keep_remote_kv", keep_remote_kv):
    saved = jax.checkpoint_policies.save_only_these_names(
      *check_checkpoint_names(options.get("checkpoint_names"))
    )
    attend = jax.checkpoint(attend, policy=saved)
  out, lse, max_logits = attend(q, k, v, segment_ids, sink)
  if max_logits is not None and reduce_max_logits:
    max_logits = lax.pmax(lax.stop_gradient(max_logits), axis_name)
  return out, AttnForwardMeta(lse, max_logits)


def _one_document(length: int, causal: Any, window: Any) -> AttentionMask:
  ids = np.ones(length, np.int32)
  return AttentionMask.from_segment_ids(ids, 1, causal=causal, window=window)


def _rows_of(mask: AttentionMask, own: jax.Array, local: int) -> AttentionMask:
  """The mask of a rank's queries, given by the blocks of the sequence, over all keys."""
  size, k_len = local // own.shape[0], mask.k_len
  parts = []
  for i in range(own.shape[0]):
    begin = own[i] * size
    block = mask.crop(begin, begin + size, 0, k_len, q_len=size)
    parts.append(block.crop(-i * size, local - i * size, 0, k_len))
  return functools.reduce(lambda a, b: a + b, parts)


def _in_sequence(x: Any, blocks: np.ndarray) -> jax.Array:
  """Sorts the rows of all ranks into the order of the sequence."""
  if (np.diff(blocks.ravel()) == 1).all():
    return x
  x = x.reshape(blocks.size, -1, *x.shape[1:])
  return x[np.argsort(blocks.ravel())].reshape(-1, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, axis_name: str) -> jax.Array:
  """Gathers the rows of all ranks. Gradients are summed over ranks in float32, and rounded once."""
  rows: jax.Array = lax.all_gather(x, axis_name, tiled=True)
  return rows


def _gather_fwd(x: jax.Array, axis_name: str) -> tuple[jax.Array, tuple[()]]:
  return _gather(x, axis_name), ()


def _gather_bwd(axis_name: str, _: tuple[()], gradient: jax.Array) -> tuple[jax.Array]:
  total = lax.psum_scatter(gradient.astype(np.float32), axis_name, tiled=True)
  return (total.astype(gradient.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)
