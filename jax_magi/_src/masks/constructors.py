"""The slices of named masks, with their numbers of queries and keys.

To add a mask, write a function here, and a class method of `AttentionMask` that calls it.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_magi._src.arguments import (
  as_int32,
  check_choice,
  check_flag,
  check_length,
  check_no_symbols,
  known_value,
)
from jax_magi._src.masks.cover import cover
from jax_magi._src.masks.segments import as_ids, check_padding_id, segment_slices
from jax_magi._src.masks.slices import UNBOUNDED, check_ranges
from jax_magi._src.masks.windows import band_around, sizes_band, window_band
from jax_magi._src.transforms.explicit import unsplit, with_auto_axes

# int32 `[num_slices, 6]`, numpy if all arguments are known; q_len; k_len.
Parts = tuple[np.ndarray | jax.Array, int, int]


class MaskType(enum.IntFlag):
  """The mask types of a pair of ranges, as bits.

  CAUSAL is aligned to the bottom right corner of its rectangle, INV_CAUSAL to the top left one;
  BI_CAUSAL combines both.

      FULL      CAUSAL    INV_CAUSAL  BI_CAUSAL
      # # # #   # # . .   # # # #     # # . .
      # # # #   # # # .   . # # #     . # # .
      # # # #   # # # #   . . # #     . . # #
  """

  FULL = 0
  CAUSAL = 1
  INV_CAUSAL = 2
  BI_CAUSAL = 3


def sliding_window(
  q_len: Any, k_len: Any, *, left: int | None, right: int | None, align: str
) -> Parts:
  """One slice: a band, or the whole rectangle if neither side has a limit."""
  q_len = check_length("q_len", q_len)
  k_len = q_len if k_len is None else check_length("k_len", k_len)
  diagonal = 0 if _is_top_left(align) else k_len - q_len
  band = band_around(diagonal, sizes_band(left, right))
  return np.array([[0, q_len, 0, k_len, *band]], np.int32), q_len, k_len


def from_ranges(
  q_ranges: Any, k_ranges: Any, attn_type_map: Any = None, *, q_len: Any = None, k_len: Any = None
) -> Parts:
  """One slice per pair of ranges `[n, 2]`."""
  q_ranges = unsplit(as_int32("q_ranges", q_ranges, ("n", 2)))
  k_ranges = unsplit(as_int32("k_ranges", k_ranges, (q_ranges.shape[0], 2)))
  if attn_type_map is None:
    attn_type_map = np.zeros(q_ranges.shape[0], np.int32)
  types = unsplit(as_int32("attn_type_map", attn_type_map, (q_ranges.shape[0],)))
  q_len = _length_or_largest("q_len", q_len, q_ranges)
  k_len = _length_or_largest("k_len", k_len, k_ranges)
  if isinstance(types, np.ndarray) and ((types < 0) | (types > 3)).any():
    i = int(np.argmax((types < 0) | (types > 3)))
    raise ValueError(f"attn_type_map[{i}] must be a MaskType in 0 .. 3, got {types[i]}")
  for name, ranges, length in (("q_ranges", q_ranges, q_len), ("k_ranges", k_ranges, k_len)):
    if isinstance(ranges, np.ndarray):
      check_ranges(name, ranges[:, 0], ranges[:, 1], length)

  xp: Any = np if all(isinstance(x, np.ndarray) for x in (q_ranges, k_ranges, types)) else jnp
  lo = xp.where(types & MaskType.INV_CAUSAL, k_ranges[:, 0] - q_ranges[:, 0], -UNBOUNDED)
  hi = xp.where(types & MaskType.CAUSAL, k_ranges[:, 1] - q_ranges[:, 1], UNBOUNDED)
  bands = xp.stack([lo, hi], axis=1).astype(np.int32)
  return xp.concatenate([q_ranges, k_ranges, bands], axis=1), q_len, k_len


def from_dense(dense: Any) -> tuple[np.ndarray, int, int]:
  """One slice for each run of rows whose key intervals fit one band."""
  value = known_value(dense)
  if value is None:
    raise ValueError(
      "dense must not be traced: the number of slices depends on its values; pass a traced "
      "boolean mask to dot_product_attention"
    )
  if value.ndim != 2 or value.dtype != bool:
    raise ValueError(f"dense must be boolean [q_len, k_len], got {value.dtype} {list(value.shape)}")
  q_len, k_len = value.shape
  slices = cover(value)
  assert slices is not None
  return slices, check_length("q_len", q_len), check_length("k_len", k_len)


def from_cu_seqlens(
  cu_seqlens_q: Any, cu_seqlens_k: Any, *, causal: Any, align: str, q_len: Any, k_len: Any
) -> Parts:
  """One slice per document, from cumulative lengths `[num_documents + 1]`."""
  cu_q = unsplit(as_int32("cu_seqlens_q", cu_seqlens_q, ("num_documents + 1",)))
  if cu_seqlens_k is None:
    cu_k, k_len = cu_q, q_len if k_len is None else k_len
  else:
    cu_k = unsplit(as_int32("cu_seqlens_k", cu_seqlens_k, cu_q.shape))
  for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
    if cu.shape[0] == 0:
      raise ValueError(f"{name} must begin with 0, got no entries")
    if isinstance(cu, np.ndarray) and cu[0] != 0:
      raise ValueError(f"{name} must begin with 0 (sums of lengths, not lengths), got {cu[0]}")
    if isinstance(cu, np.ndarray) and (np.diff(cu) < 0).any():
      i = int(np.argmax(np.diff(cu) < 0))
      raise ValueError(f"{name} must not decrease, got {cu[i]} and {cu[i + 1]} at {i} and {i + 1}")
  for name, cu, length_name, length in (
    ("cu_seqlens_q", cu_q, "q_len", q_len),
    ("cu_seqlens_k", cu_k, "k_len", k_len),
  ):
    if length is not None and isinstance(cu, np.ndarray):
      if cu[-1] > check_length(length_name, length):
        raise ValueError(f"{name} must end at {length_name} = {length} or before, got {cu[-1]}")
  q_ranges, k_ranges = (
    (np if isinstance(cu, np.ndarray) else jnp).stack([cu[:-1], cu[1:]], axis=1)
    for cu in (cu_q, cu_k)
  )
  mask_type = MaskType.CAUSAL if check_flag("causal", causal) else MaskType.FULL
  types = np.full(cu_q.shape[0] - 1, mask_type, np.int32)
  slices, q_len, k_len = from_ranges(q_ranges, k_ranges, types, q_len=q_len, k_len=k_len)
  if not _is_top_left(align) or mask_type == MaskType.FULL:
    return slices, q_len, k_len
  xp: Any = np if isinstance(slices, np.ndarray) else jnp
  diagonal = (k_ranges[:, :1] - q_ranges[:, :1]).astype(np.int32)
  return xp.concatenate([slices[:, :5], diagonal], axis=1), q_len, k_len


def from_segment_ids(
  ids: Any,
  max_segments: Any,
  *,
  kv_ids: Any = None,
  padding_id: Any = 0,
  causal: Any = False,
  window: Any = None,
  align: str = "bottom_right",
) -> Parts:
  """One slice per segment, and slices of zeros for absent segments."""
  slices, _ = checked_segment_ids(
    ids,
    max_segments,
    kv_ids=kv_ids,
    padding_id=padding_id,
    causal=causal,
    window=window,
    align=align,
  )
  return slices, np.shape(ids)[0], np.shape(ids if kv_ids is None else kv_ids)[0]


def checked_segment_ids(
  ids: Any,
  max_segments: Any,
  *,
  kv_ids: Any = None,
  padding_id: Any = 0,
  causal: Any = False,
  window: Any = None,
  align: str = "bottom_right",
  names: tuple[str, str] = ("ids", "kv_ids"),
) -> tuple[np.ndarray | jax.Array, Any]:
  """The slices, and whether traced ids are invalid. `names` names both ids in errors."""
  max_segments = check_length("max_segments", max_segments)
  ids = as_ids(names[0], ids, ("q_len",))
  key_ids = ids if kv_ids is None else as_ids(names[1], kv_ids, ("k_len",))
  for name, x in zip(names, (ids, key_ids), strict=True):
    check_no_symbols(name, x.shape)
  if isinstance(window, (int, np.integer)):
    raise ValueError(f"window must be None or a pair (left, right), got {window!r}")
  padding_id = check_padding_id(padding_id)
  band = window_band("window", window, is_causal=check_flag("causal", causal))
  is_top_left = _is_top_left(align)

  def slices(*ids: Any) -> tuple[np.ndarray | jax.Array, Any]:
    return segment_slices(
      ids[0],
      ids[-1],
      max_segments,
      padding_id=padding_id,
      band=band,
      is_top_left=is_top_left,
      names=names,
    )

  both = (ids,) if key_ids is ids else (ids, key_ids)
  if not all(isinstance(x, np.ndarray) for x in both):
    slices = with_auto_axes(slices, both, lambda: (P(), P()))
  return slices(*both)


def prefix_lm(prefix_len: Any, length: Any) -> Parts:
  """A full slice for the prefix, a causal one for the tokens after it."""
  prefix_len = check_length("prefix_len", prefix_len)
  length = check_length("length", length)
  if prefix_len > length:
    raise ValueError(f"prefix_len must be at most length = {length}, got {prefix_len}")
  q_ranges = [[0, prefix_len], [prefix_len, length]]
  k_ranges = [[0, prefix_len], [0, length]]
  types = [MaskType.FULL, MaskType.CAUSAL]
  return from_ranges(q_ranges, k_ranges, types, q_len=length, k_len=length)


def block_causal(block_size: Any, length: Any) -> Parts:
  """A full slice per block of queries."""
  block_size = check_length("block_size", block_size)
  length = check_length("length", length)
  if block_size == 0:
    raise ValueError("block_size must be positive, got 0")
  begin = np.arange(0, length, block_size)
  end = np.minimum(begin + block_size, length)
  q_ranges, k_ranges = (np.stack([x, end], axis=1) for x in (begin, np.zeros_like(end)))
  return from_ranges(q_ranges, k_ranges, q_len=length, k_len=length)


def shared_question(question_len: Any, answer_lens: Any) -> Parts:
  """A causal slice for the question, one per answer."""
  answers = as_int32("answer_lens", answer_lens, ("num_answers",))
  if not isinstance(answers, np.ndarray):
    raise ValueError("answer_lens must be known: the mask's length depends on them")
  if (answers < 0).any():
    raise ValueError(f"answer_lens must not be negative, but one is {answers.min()}")
  question_len = check_length("question_len", question_len)
  bounds = question_len + np.concatenate([[0], np.cumsum(answers)])
  length = check_length("question_len and answer_lens together", int(bounds[-1]))
  own = np.stack([bounds[:-1], bounds[1:]], axis=1)
  # All tokens see the question up to themselves: one slice. Cutting it where answers begin would
  # make more blocks touch more than one slice.
  q_ranges = np.concatenate([[[0, length]], own])
  k_ranges = np.concatenate([[[0, question_len]], own])
  bands = np.broadcast_to([-UNBOUNDED, 0], q_ranges.shape)
  slices = np.concatenate([q_ranges, k_ranges, bands], axis=1)
  return slices.astype(np.int32), length, length


def prefix_tree(parents: Any, lengths: Any) -> Parts:
  """One slice per node and run of its descendants: one per node if descendants follow directly."""
  parents = as_int32("parents", parents, ("num_nodes",))
  lengths = as_int32("lengths", lengths, (parents.shape[0],))
  for name, x in (("parents", parents), ("lengths", lengths)):
    if not isinstance(x, np.ndarray):
      raise ValueError(f"{name} must be known: the mask's slices depend on them")
  count = len(parents)
  is_bad = (parents < -1) | (parents >= np.arange(count))
  if is_bad.any():
    i = int(np.argmax(is_bad))
    raise ValueError(f"parents[{i}] must be -1 or a node before it, got {parents[i]}")
  if (lengths < 0).any():
    raise ValueError(f"lengths must not be negative, but one is {lengths.min()}")
  bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
  length = check_length("the sum of lengths", int(bounds[-1]))
  # For each node, the runs of nodes that see it.
  runs: list[list[list[int]]] = [[] for _ in range(count)]
  for node in range(count):
    ancestor = node
    while ancestor >= 0:
      mine = runs[ancestor]
      if mine and mine[-1][1] == bounds[node]:
        mine[-1][1] = int(bounds[node + 1])
      else:
        mine.append([int(bounds[node]), int(bounds[node + 1])])
      ancestor = int(parents[ancestor])
  slices = [
    [*run, bounds[node], bounds[node + 1], -UNBOUNDED, 0]
    for node in range(count)
    for run in runs[node]
  ]
  return np.array(slices, np.int32).reshape(-1, 6), length, length


def _is_top_left(align: str) -> bool:
  check_choice("align", align, ("bottom_right", "top_left"))
  return align == "top_left"


def _length_or_largest(name: str, length: Any, ranges: np.ndarray | jax.Array) -> int:
  if length is not None:
    return check_length(name, length)
  if not isinstance(ranges, np.ndarray):
    raise ValueError(f"{name} must be given when the ranges are traced")
  return max(int(ranges.max(initial=0)), 0)
