"""Attention masks as lists of banded rectangles."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_magi._sharding import with_auto_axes
from jax_magi._slices import (
  HI,
  K_BEGIN,
  K_END,
  LO,
  Q_BEGIN,
  Q_END,
  UNBOUNDED,
  area_of,
  as_int32,
  check_disjoint,
  check_length,
  check_ranges,
  concrete,
  segment_bounds,
  visible,
)

# Rows drawn per slice: more than a figure has pixels.
_MAX_PLOT_ROWS = 2048


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


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttentionMask:
  """Which keys each query sees: a list of banded rectangles ("slices").

  Pair (i, j) of query and key is visible iff some slice has

      q_begin <= i < q_end,   k_begin <= j < k_end,   lo <= j - i <= hi.

  The mask is data: `slices` may be traced, and new slices of the same shape never recompile.
  Slices of zeros are padding and cost nothing.

  No pair may be covered by two slices. Concrete slices are checked when the mask is made; traced
  ones cannot be, and the result for a pair covered twice is not defined.

  Attributes:
    slices: int32 `[num_slices, 6]`, each (q_begin, q_end, k_begin, k_end, lo, hi). An unbounded
      band edge is -2**30 or 2**30.
    q_len: number of queries (static).
    k_len: number of keys (static).
  """

  slices: np.ndarray | jax.Array
  q_len: int
  k_len: int

  def __post_init__(self):
    set_field = object.__setattr__  # The class is frozen for its users.
    set_field(self, "q_len", check_length("q_len", self.q_len))
    set_field(self, "k_len", check_length("k_len", self.k_len))
    slices = as_int32("slices", self.slices, ("num_slices", 6))
    if isinstance(slices, np.ndarray):
      check_ranges("q range of slices", slices[:, Q_BEGIN], slices[:, Q_END], self.q_len)
      check_ranges("k range of slices", slices[:, K_BEGIN], slices[:, K_END], self.k_len)
      check_disjoint(slices)
    set_field(self, "slices", slices)

  # --- pytree: slices are the leaf, lengths are static ---

  def tree_flatten_with_keys(self):
    """For JAX."""
    return ((jax.tree_util.GetAttrKey("slices"), self.slices),), (self.q_len, self.k_len)

  @classmethod
  def tree_unflatten(cls, lengths, leaves):
    """For JAX. Leaves may be anything here, so nothing is checked."""
    mask = object.__new__(cls)
    for name, value in zip(("slices", "q_len", "k_len"), (*leaves, *lengths), strict=True):
      object.__setattr__(mask, name, value)
    return mask

  # --- constructors ---

  @classmethod
  def full(cls, q_len: int, k_len: int | None = None) -> AttentionMask:
    """Every query sees every key."""
    return cls.sliding_window(q_len, k_len, left=None, right=None)

  @classmethod
  def causal(cls, q_len: int, k_len: int | None = None) -> AttentionMask:
    """Each query sees the keys up to its own; the last query sees the last key."""
    return cls.sliding_window(q_len, k_len, left=None, right=0)

  @classmethod
  def sliding_window(
    cls, q_len: int, k_len: int | None = None, *, left: int | None, right: int | None = 0
  ) -> AttentionMask:
    """Each query sees `left` keys before its own and `right` after it; None is no limit.

    The last query's own key is the last one (bottom right alignment).
    """
    q_len = check_length("q_len", q_len)
    k_len = q_len if k_len is None else check_length("k_len", k_len)
    lo, hi = _window_band(left, right)
    return cls(np.array([_banded(0, q_len, 0, k_len, k_len - q_len, lo, hi)]), q_len, k_len)

  @classmethod
  def from_ranges(
    cls,
    q_ranges: Any,
    k_ranges: Any,
    attn_type_map: Any = None,
    *,
    q_len: int | None = None,
    k_len: int | None = None,
  ) -> AttentionMask:
    """One slice per pair of ranges.

    Args:
      q_ranges: int `[n, 2]`, half open.
      k_ranges: int `[n, 2]`, half open.
      attn_type_map: int `[n]` of `MaskType`; None is FULL.
      q_len: number of queries; may be left out for concrete ranges (the largest end).
      k_len: number of keys, likewise.
    """
    q_ranges = as_int32("q_ranges", q_ranges, ("n", 2))
    k_ranges = as_int32("k_ranges", k_ranges, (q_ranges.shape[0], 2))
    if attn_type_map is None:
      attn_type_map = np.zeros(q_ranges.shape[0], np.int32)
    types = as_int32("attn_type_map", attn_type_map, (q_ranges.shape[0],))
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
  def from_cu_seqlens(
    cls,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    causal: bool = False,
    q_len: int | None = None,
    k_len: int | None = None,
  ) -> AttentionMask:
    """Packed documents, given by cumulative lengths `[num_documents + 1]` that begin with 0."""
    cu_q = as_int32("cu_seqlens_q", cu_seqlens_q, ("num_documents + 1",))
    if cu_seqlens_k is None:
      cu_k, k_len = cu_q, q_len if k_len is None else k_len
    else:
      cu_k = as_int32("cu_seqlens_k", cu_seqlens_k, cu_q.shape)
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
      if cu.shape[0] == 0:
        raise ValueError(f"{name} must begin with 0, got no entries")
      if isinstance(cu, np.ndarray) and cu[0] != 0:
        raise ValueError(f"{name} must begin with 0 (sums of lengths, not lengths), got {cu[0]}")
    q_ranges, k_ranges = (
      (np if isinstance(cu, np.ndarray) else jnp).stack([cu[:-1], cu[1:]], axis=1)
      for cu in (cu_q, cu_k)
    )
    mask_type = MaskType.CAUSAL if causal else MaskType.FULL
    types = np.full(cu_q.shape[0] - 1, mask_type, np.int32)
    return cls.from_ranges(q_ranges, k_ranges, types, q_len=q_len, k_len=k_len)

  @classmethod
  def from_segment_ids(
    cls,
    ids: Any,
    max_segments: int,
    *,
    kv_ids: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
  ) -> AttentionMask:
    """Packed documents, given by each token's document number; traced ids are welcome.

    Tokens see the tokens of their own document. Each document's tokens must be contiguous; for
    concrete ids that is checked. For traced ids it is not, and tokens with a number above
    `max_segments` see nothing.

    Args:
      ids: int `[q_len]` in 0 .. max_segments; 0 is padding, which sees nothing.
      max_segments: the number of slices (static).
      kv_ids: int `[k_len]`, the keys' document numbers; None is `ids`.
      causal: keys after the query are hidden, each document's last tokens aligned.
      window: (left, right), as in `sliding_window`, inside each document.
    """
    max_segments = check_length("max_segments", max_segments)
    ids = as_int32("ids", ids, ("q_len",))
    key_ids = ids if kv_ids is None else as_int32("kv_ids", kv_ids, ("k_len",))
    if window is not None and (not isinstance(window, tuple) or len(window) != 2):
      raise ValueError(f"window must be None or a pair (left, right), got {window!r}")
    lo, hi = (None, None) if window is None else _window_band(*window)
    if causal:
      hi = 0 if hi is None else min(hi, 0)

    def slices(ids, key_ids):
      return _segment_slices(ids, key_ids, max_segments, lo, hi)

    if not isinstance(ids, np.ndarray):
      slices = with_auto_axes(slices, ids, lambda _: P())
    return cls(slices(ids, key_ids), ids.shape[0], key_ids.shape[0])

  @classmethod
  def prefix_lm(cls, prefix_len: int, length: int) -> AttentionMask:
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
  def block_causal(cls, block_size: int, length: int) -> AttentionMask:
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
  def shared_question(cls, question_len: int, answer_lens: Any) -> AttentionMask:
    """One question, then several answers that each see the question and themselves, causally."""
    answers = as_int32("answer_lens", answer_lens, ("num_answers",))
    if not isinstance(answers, np.ndarray):
      raise ValueError("answer_lens must be concrete: the mask's length depends on them")
    question_len = check_length("question_len", question_len)
    bounds = question_len + np.concatenate([[0], np.cumsum(answers)])
    own = np.stack([bounds[:-1], bounds[1:]], axis=1)
    question = np.broadcast_to([[0, question_len]], own.shape)
    length = int(bounds[-1])
    return cls.from_ranges(
      np.concatenate([[[0, question_len]], own, own]),
      np.concatenate([[[0, question_len]], own, question]),
      [MaskType.CAUSAL] * (1 + len(own)) + [MaskType.FULL] * len(own),
      q_len=length,
      k_len=length,
    )

  # --- new masks from old ---

  def __add__(self, other: AttentionMask) -> AttentionMask:
    """The disjoint union."""
    if not isinstance(other, AttentionMask):
      return NotImplemented
    if (self.q_len, self.k_len) != (other.q_len, other.k_len):
      raise ValueError(
        f"masks to add must have the same lengths, got {self.q_len} x {self.k_len} "
        f"and {other.q_len} x {other.k_len}"
      )
    both = [self.slices, other.slices]
    xp: Any = np if all(isinstance(s, np.ndarray) for s in both) else jnp
    return AttentionMask(xp.concatenate(both), self.q_len, self.k_len)

  def crop(self, q_begin: int, q_end: int, k_begin: int, k_end: int) -> AttentionMask:
    """The mask inside a window of the score matrix, as a mask of its own.

    The window may reach past the mask, where nothing is visible. The number of slices stays.
    """
    xp: Any = np if isinstance(self.slices, np.ndarray) else jnp
    s = self.slices
    q_len, k_len = q_end - q_begin, k_end - k_begin
    q = xp.clip(s[:, Q_BEGIN : Q_END + 1] - q_begin, 0, q_len)
    k = xp.clip(s[:, K_BEGIN : K_END + 1] - k_begin, 0, k_len)
    bands = s[:, LO : HI + 1]
    shifted = xp.clip(bands - (k_begin - q_begin), -UNBOUNDED, UNBOUNDED)
    bands = xp.where(xp.abs(bands) >= UNBOUNDED, bands, shifted)
    return AttentionMask(xp.concatenate([q, k, bands], axis=1), q_len, k_len)

  def pad(self, num_slices: int) -> AttentionMask:
    """The same mask with zero slices appended, up to `num_slices`."""
    missing = check_length("num_slices", num_slices) - self.slices.shape[0]
    if missing < 0:
      raise ValueError(f"the mask has {self.slices.shape[0]} slices, more than {num_slices}")
    xp: Any = np if isinstance(self.slices, np.ndarray) else jnp
    slices = xp.concatenate([self.slices, xp.zeros((missing, 6), np.int32)])
    return AttentionMask(slices, self.q_len, self.k_len)

  # --- looking at it ---

  def to_dense(self) -> np.ndarray | jax.Array:
    """bool `[q_len, k_len]`, True where visible; numpy if the slices are concrete."""
    if not isinstance(self.slices, np.ndarray):
      rows = jnp.arange(self.q_len)[:, None]
      return visible(self.slices, rows, jnp.arange(self.k_len)[None, :])
    dense = np.zeros((self.q_len, self.k_len), bool)
    for q_begin, q_end, k_begin, k_end, lo, hi in self.slices.tolist():
      diagonal = np.arange(k_begin, k_end)[None, :] - np.arange(q_begin, q_end)[:, None]
      dense[q_begin:q_end, k_begin:k_end] |= (lo <= diagonal) & (diagonal <= hi)
    return dense

  def area(self) -> int | jax.Array:
    """Number of visible pairs: an exact int for concrete slices, else a float32 scalar."""
    total = area_of(self.slices).sum()
    return int(total) if isinstance(self.slices, np.ndarray) else total

  def plot(self, ax: Any = None, *, title: str | None = None) -> Any:
    """Draws the mask, one colour per slice, and returns the matplotlib axes.

    Needs concrete slices and matplotlib (`pip install jax-magi[plot]`).
    """
    slices = concrete(self.slices)
    if slices is None:
      raise ValueError("plot needs concrete slices, got traced ones")
    import matplotlib.pyplot as plt

    if ax is None:
      ax = plt.figure(figsize=(4, 4), layout="constrained").add_subplot()
    colors = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for i, (q_begin, q_end, k_begin, k_end, lo, hi) in enumerate(slices.tolist()):
      num_rows = min(q_end - q_begin, _MAX_PLOT_ROWS)
      rows = np.unique(np.linspace(q_begin, q_end - 1, max(num_rows, 0)).astype(int))
      begin, end = np.maximum(k_begin, rows + lo), np.minimum(k_end, rows + hi + 1)
      # Each row is a band of height one: the last one needs its lower edge drawn.
      edges = np.append(rows, q_end)
      begin, end = np.append(begin, begin[-1:]), np.append(end, end[-1:])
      ax.fill_betweenx(
        edges[: len(begin)], begin, end, where=end > begin, step="post", color=colors[i % 10], lw=0
      )
    ax.set(xlim=(0, max(self.k_len, 1)), ylim=(max(self.q_len, 1), 0))
    ax.set(xlabel="key", ylabel="query", title=title, aspect="equal")
    return ax

  def __repr__(self) -> str:
    slices = self.slices
    if isinstance(slices, np.ndarray) and slices.ndim == 2 and slices.dtype == np.int32:
      detail = f"{slices.shape[0]} slices, {self.area()} visible pairs"
    else:  # Traced, batched, or whatever a tree_map put here.
      detail = f"slices={slices!r}"
    return f"AttentionMask({self.q_len} x {self.k_len}, {detail})"


def _window_band(left: int | None, right: int | None) -> tuple[int | None, int | None]:
  """(left, right) as band offsets from the diagonal; None is no limit."""
  for name, size in (("left", left), ("right", right)):
    if size is None:
      continue
    if not isinstance(size, (int, np.integer)) or not 0 <= size < UNBOUNDED:
      raise ValueError(f"{name} must be None or an integer in [0, 2**30), got {size!r}")
  return None if left is None else -int(left), None if right is None else int(right)


def _segment_slices(
  ids: Any, key_ids: Any, max_segments: int, lo: int | None, hi: int | None
) -> np.ndarray | jax.Array:
  """One slice a segment; the band is given as offsets from the segments' last tokens."""
  q_begin, q_end = segment_bounds("ids", ids, max_segments)
  k_begin, k_end = segment_bounds("kv_ids", key_ids, max_segments)
  xp: Any = np if isinstance(q_begin, np.ndarray) and isinstance(k_begin, np.ndarray) else jnp
  diagonal = k_end - q_end
  columns = [
    q_begin,
    q_end,
    k_begin,
    k_end,
    xp.full_like(diagonal, -UNBOUNDED) if lo is None else _bounded(diagonal + lo),
    xp.full_like(diagonal, UNBOUNDED) if hi is None else _bounded(diagonal + hi),
  ]
  # A segment without queries or without keys becomes padding.
  absent = (q_begin >= q_end) | (k_begin >= k_end)
  return xp.where(absent[:, None], 0, xp.stack(columns, axis=1)).astype(np.int32)


def _bounded(edge: Any) -> Any:
  return edge.clip(-UNBOUNDED, UNBOUNDED)


def _banded(q_begin, q_end, k_begin, k_end, diagonal, lo, hi) -> list[int]:
  """A slice whose band is given as offsets from `diagonal`; None is no limit."""
  lo = -UNBOUNDED if lo is None else max(diagonal + lo, -UNBOUNDED)
  hi = UNBOUNDED if hi is None else min(diagonal + hi, UNBOUNDED)
  return [q_begin, q_end, k_begin, k_end, lo, hi]


def _length_or_largest(name: str, length: int | None, ranges: np.ndarray | jax.Array) -> int:
  if length is not None:
    return check_length(name, length)
  if not isinstance(ranges, np.ndarray):
    raise ValueError(f"{name} must be given when the ranges are traced")
  return max(int(ranges.max(initial=0)), 0)
