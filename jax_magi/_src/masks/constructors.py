"""The ways to make a mask. A new one is a method here."""

from __future__ import annotations

import enum
from typing import Any, Self

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
  concrete,
)
from jax_magi._src.masks.cover import cover
from jax_magi._src.masks.slices import UNBOUNDED, check_ranges, segment_bounds
from jax_magi._src.masks.windows import Edge, band_around, sizes_band, window_band
from jax_magi._src.transforms.explicit import unsplit, with_auto_axes


class MaskType(enum.IntFlag):
  """The four classic shapes of a range pair, as bits.

  CAUSAL is aligned to the bottom right corner of its rectangle, INV_CAUSAL to the top left one;
  BI_CAUSAL is both at once.

      FULL      CAUSAL    INV_CAUSAL  BI_CAUSAL
      # # # #   # # . .   # # # #     # # . .
      # # # #   # # # .   . # # #     . # # .
      # # # #   # # # #   . . # #     . . # #
  """

  FULL = 0
  CAUSAL = 1
  INV_CAUSAL = 2
  BI_CAUSAL = 3


class MaskConstructors:
  """Constructors of `AttentionMask`, the class that is made of (slices, q_len, k_len)."""

  slices: Any
  q_len: int
  k_len: int

  def __init__(self, slices: Any, q_len: int, k_len: int) -> None:
    raise NotImplementedError  # The class's own.

  @classmethod
  def tree_unflatten(cls, lengths: Any, leaves: Any) -> Self:
    """For JAX."""
    raise NotImplementedError  # The class's own.

  @classmethod
  def full(cls, q_len: int, k_len: int | None = None) -> Self:
    """Every query sees every key."""
    return cls.sliding_window(q_len, k_len, left=None, right=None)

  @classmethod
  def causal(cls, q_len: int, k_len: int | None = None, *, align: str = "bottom_right") -> Self:
    """Each query sees the keys up to its own, which is said by `align`: see `sliding_window`."""
    return cls.sliding_window(q_len, k_len, left=None, right=0, align=align)

  @classmethod
  def sliding_window(
    cls,
    q_len: int,
    k_len: int | None = None,
    *,
    left: int | None,
    right: int | None = 0,
    align: str = "bottom_right",
  ) -> Self:
    """Each query sees `left` keys before its own and `right` after it; None is no limit.

    With `align` "bottom_right", the last query's own key is the last one; with "top_left", the
    first query's is the first one.
    """
    q_len = check_length("q_len", q_len)
    k_len = q_len if k_len is None else check_length("k_len", k_len)
    diagonal = 0 if _is_top_left(align) else k_len - q_len
    band = band_around(diagonal, sizes_band(left, right))
    return cls(np.array([[0, q_len, 0, k_len, *band]], np.int32), q_len, k_len)

  @classmethod
  def from_ranges(
    cls,
    q_ranges: Any,
    k_ranges: Any,
    attn_type_map: Any = None,
    *,
    q_len: int | None = None,
    k_len: int | None = None,
  ) -> Self:
    """One slice per pair of ranges.

    Args:
      q_ranges: int `[n, 2]`, half open.
      k_ranges: int `[n, 2]`, half open.
      attn_type_map: int `[n]` of `MaskType`; None is FULL.
      q_len: number of queries; may be left out for concrete ranges (the largest end).
      k_len: number of keys, likewise.
    """
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
    return cls(xp.concatenate([q_ranges, k_ranges, bands], axis=1), q_len, k_len)

  @classmethod
  def from_dense(cls, dense: Any) -> Self:
    """A mask that is given as booleans `[q_len, k_len]`, True is visible; they must be known.

    Slices are made of the intervals of keys that rows see. What makes a slice is a run of rows
    whose interval stays where it is, or widens, moves or narrows along the diagonal. A mask made of
    few rectangles, triangles and bands thus has few slices; one without any order has up to one for
    each interval of each row. It takes as long as reading the booleans a few times.
    """
    value = concrete(dense)
    if value is None:
      raise ValueError(
        "dense must be known: a traced mask's number of slices is not; dot_product_attention takes "
        "it as a boolean mask"
      )
    if value.ndim != 2 or value.dtype != bool:
      raise ValueError(
        f"dense must be boolean [q_len, k_len], got {value.dtype} {list(value.shape)}"
      )
    slices = cover(value)
    assert slices is not None
    # Not by the class, which would compare each with each: they are disjoint as they were made.
    slices.flags.writeable = False
    return cls.tree_unflatten(
      (check_length("q_len", value.shape[0]), check_length("k_len", value.shape[1])), (slices,)
    )

  @classmethod
  def from_cu_seqlens(
    cls,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    causal: bool = False,
    align: str = "bottom_right",
    q_len: int | None = None,
    k_len: int | None = None,
  ) -> Self:
    """Packed documents, given by cumulative lengths `[num_documents + 1]` that begin with 0.

    `align` says which is a query's own key where a document's queries and keys are not as many: see
    `sliding_window`.
    """
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
        raise ValueError(
          f"{name} must not decrease, got {cu[i]} and {cu[i + 1]} at {i} and {i + 1}"
        )
    q_ranges, k_ranges = (
      (np if isinstance(cu, np.ndarray) else jnp).stack([cu[:-1], cu[1:]], axis=1)
      for cu in (cu_q, cu_k)
    )
    mask_type = MaskType.CAUSAL if check_flag("causal", causal) else MaskType.FULL
    types = np.full(cu_q.shape[0] - 1, mask_type, np.int32)
    mask = cls.from_ranges(q_ranges, k_ranges, types, q_len=q_len, k_len=k_len)
    if not _is_top_left(align) or mask_type == MaskType.FULL:
      return mask
    xp: Any = np if isinstance(mask.slices, np.ndarray) else jnp
    diagonal = (k_ranges[:, :1] - q_ranges[:, :1]).astype(np.int32)
    return cls(xp.concatenate([mask.slices[:, :5], diagonal], axis=1), mask.q_len, mask.k_len)

  @classmethod
  def from_segment_ids(
    cls,
    ids: Any,
    max_segments: int,
    *,
    kv_ids: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "bottom_right",
  ) -> Self:
    """Packed documents, given by each token's document number; traced ids are welcome.

    Tokens see the tokens of their own document. Each document's tokens must be contiguous; for
    concrete ids that is checked. For traced ids it is not, and tokens with a number above
    `max_segments` see nothing.

    Args:
      ids: int `[q_len]` in 0 .. max_segments; 0 is padding, which sees nothing.
      max_segments: the number of slices (static). Traced ids above it cannot be an error, and a
        mask cannot carry one: `dot_product_attention(segment_ids=)` makes results NaN instead.
      kv_ids: int `[k_len]`, the keys' document numbers; None is `ids`.
      causal: keys after the query's own are hidden, inside each document.
      window: (left, right), as in `sliding_window`, inside each document.
      align: which is a query's own key, as in `sliding_window`, inside each document.
    """
    max_segments = check_length("max_segments", max_segments)
    ids = as_int32("ids", ids, ("q_len",))
    key_ids = ids if kv_ids is None else as_int32("kv_ids", kv_ids, ("k_len",))
    check_no_symbols("ids", ids.shape)
    check_no_symbols("kv_ids", key_ids.shape)
    if isinstance(window, (int, np.integer)):
      raise ValueError(f"window must be None or a pair (left, right), got {window!r}")
    band = window_band("window", window, is_causal=check_flag("causal", causal))
    is_top_left = _is_top_left(align)

    def slices(ids, key_ids):
      return _segment_slices(ids, key_ids, max_segments, band, is_top_left)

    if not (isinstance(ids, np.ndarray) and isinstance(key_ids, np.ndarray)):
      slices = with_auto_axes(slices, (ids, key_ids), P)
    return cls(slices(ids, key_ids), ids.shape[0], key_ids.shape[0])

  @classmethod
  def prefix_lm(cls, prefix_len: int, length: int) -> Self:
    """The first `prefix_len` tokens see each other; the others see all tokens up to themselves."""
    prefix_len = check_length("prefix_len", prefix_len)
    length = check_length("length", length)
    if prefix_len > length:
      raise ValueError(f"prefix_len must be at most length = {length}, got {prefix_len}")
    ranges = [[0, prefix_len], [prefix_len, length]]
    return cls.from_ranges(
      ranges,
      [[0, prefix_len], [0, length]],
      [MaskType.FULL, MaskType.CAUSAL],
      q_len=length,
      k_len=length,
    )

  @classmethod
  def block_causal(cls, block_size: int, length: int) -> Self:
    """Tokens see all blocks up to and including their own, whole."""
    block_size = check_length("block_size", block_size)
    length = check_length("length", length)
    if block_size == 0:
      raise ValueError("block_size must be positive, got 0")
    begin = np.arange(0, length, block_size)
    end = np.minimum(begin + block_size, length)
    return cls.from_ranges(
      np.stack([begin, end], axis=1),
      np.stack([np.zeros_like(end), end], axis=1),
      q_len=length,
      k_len=length,
    )

  @classmethod
  def shared_question(cls, question_len: int, answer_lens: Any) -> Self:
    """One question, then several answers that each see the question and themselves, causally."""
    answers = as_int32("answer_lens", answer_lens, ("num_answers",))
    if not isinstance(answers, np.ndarray):
      raise ValueError("answer_lens must be concrete: the mask's length depends on them")
    if (answers < 0).any():
      raise ValueError(f"answer_lens must not be negative, but one is {answers.min()}")
    question_len = check_length("question_len", question_len)
    bounds = question_len + np.concatenate([[0], np.cumsum(answers)])
    length = check_length("question_len and answer_lens together", int(bounds[-1]))
    own = np.stack([bounds[:-1], bounds[1:]], axis=1)
    # All tokens see the question up to themselves: one slice. Cut where answers begin, it would be
    # met in more blocks.
    q_ranges = np.concatenate([[[0, length]], own])
    k_ranges = np.concatenate([[[0, question_len]], own])
    bands = np.broadcast_to([-UNBOUNDED, 0], q_ranges.shape)
    slices = np.concatenate([q_ranges, k_ranges, bands], axis=1)
    return cls(slices.astype(np.int32), length, length)


def _segment_slices(
  ids: Any, key_ids: Any, max_segments: int, band: tuple[Edge, Edge], is_top_left: bool
) -> np.ndarray | jax.Array:
  """One slice a segment; the band is given as offsets from a query's own key."""
  q_begin, q_end = segment_bounds("ids", ids, max_segments)
  k_begin, k_end = segment_bounds("kv_ids", key_ids, max_segments)
  xp: Any = np if isinstance(q_begin, np.ndarray) and isinstance(k_begin, np.ndarray) else jnp
  diagonal = k_begin - q_begin if is_top_left else k_end - q_end
  columns = [q_begin, q_end, k_begin, k_end, *band_around(diagonal, band)]
  # A segment without queries or without keys becomes padding.
  absent = (q_begin >= q_end) | (k_begin >= k_end)
  return xp.where(absent[:, None], 0, xp.stack(columns, axis=1)).astype(np.int32)


def _is_top_left(align: str) -> bool:
  return check_choice("align", align, ("bottom_right", "top_left")) == "top_left"


def _length_or_largest(name: str, length: int | None, ranges: np.ndarray | jax.Array) -> int:
  if length is not None:
    return check_length(name, length)
  if not isinstance(ranges, np.ndarray):
    raise ValueError(f"{name} must be given when the ranges are traced")
  return max(int(ranges.max(initial=0)), 0)
