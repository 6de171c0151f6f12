"""The visible pairs of `dot_product_attention`: the intersection of all its mask arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.arguments import as_int32, known_value
from jax_magi._src.attention.checks import check_broadcastable, slices_of_batch
from jax_magi._src.masks import constructors
from jax_magi._src.masks.cover import cover
from jax_magi._src.masks.mask import AttentionMask
from jax_magi._src.masks.segments import as_ids, everything_if
from jax_magi._src.masks.slices import UNBOUNDED, intersected, stacked
from jax_magi._src.transforms.explicit import merged_spec, with_auto_axes

# A known boolean mask is converted to slices if there are at most MAX_SLICES of them, or at most
# q_len / QUERIES_PER_SLICE. With more slices, most tiles of the kernels would need masking.
MAX_SLICES, QUERIES_PER_SLICE = 64, 8


def visible_slices(
  shape: tuple[Any, int, int, int],
  band: tuple[int, int],
  lengths: dict[str, Any],
  segments: dict[str, Any],
  max_segments: int | None,
  padding_id: int | None,
  mask: Any,
) -> tuple[Any, Any, Any]:
  """Returns slices, and the parts of the mask that slices cannot represent.

  Args:
    shape: batch, num_q_heads, q_len, k_len.
    band: lo and hi, over positions in a row of the batch.
    lengths: query_seq_lengths and key_value_seq_lengths. Each may be None.
    segments: segment_ids and kv_segment_ids. Each may be None.
    max_segments: the largest number of documents in a row.
    padding_id: the number of padding.
    mask: an `AttentionMask`, one for each row of the batch, a boolean array, or None.

  Returns:
    int32 slices `[batch or 1, num_slices, 6]`; a boolean array that must become a bias, or None;
    and bool `[batch]`, True for rows whose traced document numbers are invalid, or None.
  """
  batch, _, q_len, k_len = shape
  sizes = batch, q_len, k_len
  slices, dense = _mask_slices(mask, shape)
  documents, is_broken = _segment_slices(sizes, segments, max_segments, padding_id)
  parts = [_length_slices(sizes, band, lengths), documents, slices]
  parts = [part for part in parts if part is not None]
  if not parts:
    parts = [np.array([[[0, q_len, 0, k_len, -UNBOUNDED, UNBOUNDED]]], np.int32)]
  return functools.reduce(intersected, parts), dense, is_broken


def hidden_by_bias(visible: Any, bias: Any, k_len: int, dtype: Any) -> Any:
  """`bias`, or zeros of `dtype`, with -inf where the boolean array `visible` hides a pair.

  The result has the shape to which both broadcast.
  """
  visible = jnp.asarray(visible)
  bias = np.zeros((1, 1, 1, 1), dtype) if bias is None else bias
  shape = jnp.broadcast_shapes(visible.shape, bias.shape, (1, 1, 1, k_len))
  hidden = np.full((1, 1, 1, 1), -np.inf, bias.dtype)

  def fun(is_shown: jax.Array, bias: jax.Array, hidden: jax.Array) -> jax.Array:
    is_shown, bias, hidden = (jnp.broadcast_to(x, shape) for x in (is_shown, bias, hidden))
    return jnp.where(is_shown, bias, hidden)

  operands = (visible, bias, hidden)
  return with_auto_axes(fun, operands, lambda: merged_spec(visible, bias))(*operands)


def _length_slices(
  sizes: tuple[Any, int, int], band: tuple[int, int], lengths: dict[str, Any]
) -> Any:
  """One slice for each row of the batch, or one for all; None if nothing is hidden."""
  batch, q_len, k_len = sizes
  given = {name: as_int32(name, x, (batch,)) for name, x in lengths.items() if x is not None}
  if not given:
    is_all = band == (-UNBOUNDED, UNBOUNDED)
    return None if is_all else np.array([[[0, q_len, 0, k_len, *band]]], np.int32)
  slices = np.array([[[0, 0, 0, 0, *band]]], np.int32)
  # Broadcasting keeps the sharding of the lengths.
  for name, column, length in (
    ("query_seq_lengths", 1, q_len),
    ("key_value_seq_lengths", 3, k_len),
  ):
    end = given.get(name, np.array([length], np.int32))
    # Known ends are clipped by numpy, because under jit, jnp would turn them into tracers.
    end = (np if isinstance(end, np.ndarray) else jnp).clip(end, 0, length)
    slices = slices + end[:, None, None] * np.eye(6, dtype=np.int32)[None, None, column]
  return slices


def _segment_slices(
  sizes: tuple[Any, int, int], segments: dict[str, Any], max_segments: Any, padding_id: Any
) -> tuple[Any, Any]:
  """One slice for each document, and which rows have invalid numbers; None without documents."""
  batch, q_len, k_len = sizes
  given = {
    name: as_ids(name, _with_batch(x), (batch, length))
    for (name, x), length in zip(segments.items(), (q_len, k_len), strict=True)
    if x is not None
  }
  if not given:
    return None, None
  if "segment_ids" not in given:
    raise ValueError("kv_segment_ids needs segment_ids")
  if max_segments is None:
    raise ValueError("segment_ids needs max_segments, a static bound on the documents of a row")
  both = tuple(given.values())
  if both[-1].shape[1] != k_len:
    raise ValueError(f"kv_segment_ids must be given: query and key have {q_len} and {k_len} tokens")

  def documents(*ids: Any) -> Any:
    return constructors.checked_segment_ids(
      ids[0],
      max_segments,
      kv_ids=None if len(ids) == 1 else ids[1],
      padding_id=padding_id,
      names=("segment_ids", "kv_segment_ids"),
    )

  if all(isinstance(x, np.ndarray) for x in both):  # Row by row, and checked.
    slices = np.array([documents(*row)[0] for row in zip(*both, strict=True)], np.int32)
    return slices.reshape(batch, max_segments, 6), None
  slices, is_broken = jax.vmap(documents)(*map(jnp.asarray, both))
  return everything_if(is_broken, slices, q_len, k_len), is_broken


def _with_batch(ids: Any) -> Any:
  """Document numbers with a batch axis; known ones stay numpy."""
  known = known_value(ids)
  ids = ids if known is None else known
  return ids[None] if ids.ndim == 1 else ids


def _mask_slices(mask: Any, shape: tuple[Any, int, int, int]) -> tuple[Any, Any]:
  """The slices of the mask, or a boolean array with four dimensions, or neither."""
  batch, _, q_len, k_len = shape
  if mask is None:
    return None, None
  if isinstance(mask, AttentionMask):
    return slices_of_batch(mask, batch, q_len, k_len), None
  if _is_sequence_of_masks(mask):
    if len(mask) != batch:
      raise ValueError(f"mask must be one AttentionMask, or {batch} of them, got {len(mask)}")
    return stacked([slices_of_batch(one, 1, q_len, k_len)[0] for one in mask]), None
  leaves = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, AttentionMask))
  if any(isinstance(x, AttentionMask) for x in leaves):
    raise ValueError(f"mask must be one AttentionMask, or a list of {batch}, got {mask!r}")
  if not hasattr(mask, "shape") and not isinstance(mask, (list, tuple)):
    raise ValueError(f"mask must be a boolean array or an AttentionMask, got {type(mask).__name__}")
  known = known_value(mask)
  dense = mask if known is None else known
  check_broadcastable("mask", dense, shape)
  if dense.dtype != bool:
    raise ValueError(
      f"mask must be boolean, got {dense.dtype}; pass values to add to the logits as bias"
    )
  slices = (
    None if known is None else _cover(known.reshape((1,) * (4 - known.ndim) + known.shape), shape)
  )
  if slices is not None:
    return slices, None
  return None, jnp.asarray(dense).reshape((1,) * (4 - dense.ndim) + dense.shape)


def _is_sequence_of_masks(mask: Any) -> bool:
  return (
    isinstance(mask, Sequence)
    and len(mask) > 0
    and all(isinstance(one, AttentionMask) for one in mask)
  )


def _cover(dense: np.ndarray, shape: tuple[Any, int, int, int]) -> np.ndarray | None:
  """The slices of a known boolean mask, if there are few."""
  _, _, q_len, k_len = shape
  if dense.shape[1] > 1 and not (dense == dense[:, :1]).all():
    return None
  rows = []
  for row in dense[:, 0]:
    slices = cover(row, max(MAX_SLICES, q_len // QUERIES_PER_SLICE))
    if slices is None:
      return None
    # An axis of length 1 stands for all queries, or all keys.
    if row.shape[0] == 1:
      slices[:, 1] = q_len
    if row.shape[1] == 1:
      slices[:, 3] = k_len
    rows.append(slices)
  together: np.ndarray = stacked(rows)
  return together
