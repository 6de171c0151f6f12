"""Attention masks as lists of banded rectangles."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.arguments import as_int32, check_length, check_position, known_value
from jax_magi._src.masks import constructors
from jax_magi._src.masks.plot import plot_slices
from jax_magi._src.masks.slices import (
  HI,
  K_BEGIN,
  K_END,
  LO,
  Q_BEGIN,
  Q_END,
  UNBOUNDED,
  area_of,
  check_disjoint,
  check_ranges,
  clamped,
  visible,
)
from jax_magi._src.masks.words import describe_slices
from jax_magi._src.transforms.explicit import unsplit


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttentionMask:
  """The keys that each query sees, as a list of banded rectangles ("slices").

  The pair of query i and key j is visible if and only if some slice has

      q_begin <= i < q_end,   k_begin <= j < k_end,   lo <= j - i <= hi.

  The mask is data: `slices` may be traced, and new slices of the same shape never recompile.
  Slices of zeros are padding and cost nothing.

  No pair may be covered by two slices. Slices that are known (numpy, or JAX arrays outside of jit)
  are checked when the mask is made. Traced slices cannot be checked, and the result for a pair
  that is covered twice is undefined.

  Masks are equal if their lengths and slices are equal, in the same order. Traced slices only equal
  themselves. Masks are hashable, so they can be static arguments of `jax.jit`.

  Attributes:
    slices: int32 `[num_slices, 6]`, each (q_begin, q_end, k_begin, k_end, lo, hi). An unbounded
      band edge is `-2**30` or `2**30`.
    q_len: number of queries (static).
    k_len: number of keys (static).
  """

  slices: np.ndarray | jax.Array
  q_len: int
  k_len: int

  def __post_init__(self) -> None:
    set_field = object.__setattr__  # The class is frozen for its users.
    set_field(self, "q_len", check_length("q_len", self.q_len))
    set_field(self, "k_len", check_length("k_len", self.k_len))
    slices = unsplit(as_int32("slices", self.slices, ("num_slices", 6)))
    if isinstance(slices, np.ndarray):
      check_ranges("q range of slices", slices[:, Q_BEGIN], slices[:, Q_END], self.q_len)
      check_ranges("k range of slices", slices[:, K_BEGIN], slices[:, K_END], self.k_len)
      check_disjoint(slices)
      # Changes would not be checked, and could make equal masks differ.
      slices.flags.writeable = False
    set_field(self, "slices", slices)

  # --- the ways to make one; `constructors.py` has their slices ---

  @classmethod
  def full(cls, q_len: int, k_len: int | None = None) -> Self:
    """Every query sees every key."""
    return cls.sliding_window(q_len, k_len, left=None, right=None)

  @classmethod
  def causal(cls, q_len: int, k_len: int | None = None, *, align: str = "bottom_right") -> Self:
    """Each query sees the keys up to its own. `align` defines that key: see `sliding_window`."""
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
    """Each query sees `left` keys before its own key and `right` keys after it.

    None means no limit. With `align="bottom_right"`, the last query's own key is the last key. With
    "top_left", the first query's own key is the first key.
    """
    return cls(*constructors.sliding_window(q_len, k_len, left=left, right=right, align=align))

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
    """A mask with one slice for each pair of query and key ranges.

    Args:
      q_ranges: int `[n, 2]`, half open.
      k_ranges: int `[n, 2]`, half open.
      attn_type_map: int `[n]` of `MaskType`. None means FULL.
      q_len: the number of queries. None means the largest end of known ranges.
      k_len: the number of keys. None means the largest end of known ranges.
    """
    return cls(
      *constructors.from_ranges(q_ranges, k_ranges, attn_type_map, q_len=q_len, k_len=k_len)
    )

  @classmethod
  def from_dense(cls, dense: Any) -> Self:
    """The slices of a boolean mask `[q_len, k_len]`, True where visible. It must not be traced.

    A slice is a run of rows whose interval of visible keys stays the same, or widens, moves or
    narrows along the diagonal. A mask of few rectangles, triangles and bands has few slices. A mask
    without structure has up to one slice for each interval of each row. This takes as long as
    reading the booleans a few times.
    """
    slices, q_len, k_len = constructors.from_dense(dense)
    # The slices are disjoint by construction, so the pairwise check of `cls` is skipped.
    slices.flags.writeable = False
    return cls.tree_unflatten((q_len, k_len), (slices,))

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

    If a document has more or fewer keys than queries, `align` defines a query's own key: see
    `sliding_window`.
    """
    return cls(
      *constructors.from_cu_seqlens(
        cu_seqlens_q, cu_seqlens_k, causal=causal, align=align, q_len=q_len, k_len=k_len
      )
    )

  @classmethod
  def from_segment_ids(
    cls,
    ids: Any,
    max_segments: int,
    *,
    kv_ids: Any = None,
    padding_id: int | None = 0,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "bottom_right",
  ) -> Self:
    """Packed documents, given by the document number of each token. The ids may be traced.

    Tokens see the tokens of their own document. Document numbers may be any non-negative numbers in
    any order, but the tokens of a document must be contiguous. Known ids are checked. Traced ids
    are not, and documents after the first `max_segments` see nothing, because a mask cannot carry
    an error. `dot_product_attention(segment_ids=)` returns NaN instead.

    Args:
      ids: int `[q_len]`.
      max_segments: the largest number of documents, which is the number of slices (static).
      kv_ids: int `[k_len]`, the document numbers of the keys. None means `ids`.
      padding_id: the number of padding, which sees nothing; often 0 or -1. None means no padding.
      causal: whether to hide keys after the query's own key, inside each document.
      window: (left, right), as in `sliding_window`, inside each document.
      align: defines a query's own key, as in `sliding_window`, inside each document.
    """
    return cls(
      *constructors.from_segment_ids(
        ids,
        max_segments,
        kv_ids=kv_ids,
        padding_id=padding_id,
        causal=causal,
        window=window,
        align=align,
      )
    )

  @classmethod
  def prefix_lm(cls, prefix_len: int, length: int) -> Self:
    """The first `prefix_len` tokens see each other. Others see all tokens up to themselves."""
    return cls(*constructors.prefix_lm(prefix_len, length))

  @classmethod
  def block_causal(cls, block_size: int, length: int) -> Self:
    """Tokens see all of their own block, and all blocks before it."""
    return cls(*constructors.block_causal(block_size, length))

  @classmethod
  def shared_question(cls, question_len: int, answer_lens: Any) -> Self:
    """One question, then several answers. Each answer sees the question and itself, causally."""
    return cls(*constructors.shared_question(question_len, answer_lens))

  @classmethod
  def prefix_tree(cls, parents: Any, lengths: Any) -> Self:
    """Sequences that share prefixes on several levels, as a tree of parts.

    Tokens see their own part up to themselves, and the parts on the way to the root. If each part
    is followed by its descendants, there is only one slice for each part.

    Args:
      parents: int `[num_parts]`, the earlier part that each part continues, or -1 for parts that
        begin a sequence.
      lengths: int `[num_parts]`, the number of tokens of each part. Parts lie one after another.
    """
    return cls(*constructors.prefix_tree(parents, lengths))

  # --- pytree: slices are the leaf, lengths are static ---

  def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], tuple[int, int]]:
    """For JAX."""
    return ((jax.tree_util.GetAttrKey("slices"), self.slices),), (self.q_len, self.k_len)

  @classmethod
  def tree_unflatten(cls, lengths: tuple[int, int], leaves: Any) -> Self:
    """For JAX. Leaves may be anything here, so nothing is checked."""
    mask = object.__new__(cls)
    for name, value in zip(("slices", "q_len", "k_len"), (*leaves, *lengths), strict=True):
      object.__setattr__(mask, name, value)
    return mask

  def __setstate__(self, state: dict[str, Any]) -> None:
    """For pickle and copy, which would make the slices writeable."""
    for name, value in state.items():
      object.__setattr__(self, name, value)
    if isinstance(self.slices, np.ndarray):
      self.slices.flags.writeable = False

  # --- equality ---

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, AttentionMask):
      return NotImplemented
    return self._identity() == other._identity()

  def __hash__(self) -> int:
    return hash(self._identity())

  def _identity(self) -> tuple[Any, ...]:
    slices = self.slices
    if isinstance(slices, (np.ndarray, jax.Array)) and slices.dtype == np.int32:
      value = known_value(slices)
      if value is not None:
        return self.q_len, self.k_len, value.shape, value.tobytes()
    # The slices are traced, or any object that a tree_map put here.
    return self.q_len, self.k_len, id(slices)

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

  def crop(
    self,
    q_begin: Any,
    q_end: Any,
    k_begin: Any,
    k_end: Any,
    *,
    q_len: int | None = None,
    k_len: int | None = None,
  ) -> AttentionMask:
    """The part of the mask inside a window of the score matrix, as a new mask.

    The window may reach past the mask, where nothing is visible. The number of slices stays the
    same.

    Args:
      q_begin: the first query of the window. The four bounds may be traced integers.
      q_end: one past the last query of the window.
      k_begin: the first key of the window.
      k_end: one past the last key of the window.
      q_len: the number of queries of the new mask (static). None means `q_end - q_begin`, which
        must then be static. Queries beyond the window see nothing.
      k_len: the number of keys of the new mask (static). None means `k_end - k_begin`.
    """
    q_begin, q_end, q_len = _bounds("q", q_begin, q_end, q_len)
    k_begin, k_end, k_len = _bounds("k", k_begin, k_end, k_len)
    shift = k_begin - q_begin
    if isinstance(shift, int):  # Shifted bands must fit in 32 bits.
      check_position("k_begin - q_begin", shift)
    arrays = (self.slices, q_begin, q_end, k_begin, k_end)
    xp: Any = jnp if any(isinstance(x, jax.Array) for x in arrays) else np
    s: Any = self.slices
    if not isinstance(s, np.ndarray):
      s = clamped(s, self.q_len, self.k_len)
    q = xp.clip(xp.minimum(s[:, Q_BEGIN : Q_END + 1], q_end) - q_begin, 0, q_len)
    k = xp.clip(xp.minimum(s[:, K_BEGIN : K_END + 1], k_end) - k_begin, 0, k_len)
    bands = s[:, LO : HI + 1]
    shifted = xp.clip(bands - shift, -UNBOUNDED, UNBOUNDED)
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
    """bool `[q_len, k_len]`, True where visible. It is a NumPy array if the slices are known."""
    if not isinstance(self.slices, np.ndarray):
      rows, keys = (jnp.arange(n, dtype=np.int32) for n in (self.q_len, self.k_len))
      return visible(self.slices, rows, keys)
    dense = np.zeros((self.q_len, self.k_len), bool)
    for q_begin, q_end, k_begin, k_end, lo, hi in self.slices.tolist():
      diagonal = np.arange(k_begin, k_end)[None, :] - np.arange(q_begin, q_end)[:, None]
      dense[q_begin:q_end, k_begin:k_end] |= (lo <= diagonal) & (diagonal <= hi)
    return dense

  def area(self) -> int | jax.Array:
    """The number of visible pairs: an exact int if the slices are known, or a float32 scalar."""
    total = area_of(self.slices).sum()
    return int(total) if isinstance(self.slices, np.ndarray) else total

  def plot(self, ax: Any = None, *, title: str | None = None) -> Any:
    """Draws the mask, with one colour for each slice, and returns the matplotlib axes.

    The slices must be known. Needs matplotlib (`pip install jax-magi[plot]`).
    """
    return plot_slices(self.slices, self.q_len, self.k_len, ax=ax, title=title)

  def __repr__(self) -> str:
    slices = self.slices
    if isinstance(slices, np.ndarray) and slices.ndim == 2 and slices.dtype == np.int32:
      detail = describe_slices(slices)
    else:  # Traced, batched, or whatever a tree_map put here.
      detail = f"slices={slices!r}"
    return f"AttentionMask({self.q_len} x {self.k_len}, {detail})"


def _bounds(side: str, begin: Any, end: Any, length: Any) -> tuple[Any, Any, int]:
  """Checks the bounds of a window, static or traced; returns them with the length of the mask."""
  begin, end = _bound(f"{side}_begin", begin), _bound(f"{side}_end", end)
  if length is not None:
    return begin, end, check_length(f"{side}_len", length)
  if isinstance(begin, jax.Array) or isinstance(end, jax.Array):
    raise ValueError(
      f"{side}_len must be given if {side}_begin or {side}_end is traced: a mask's lengths are "
      "static"
    )
  return begin, end, check_length(f"{side}_end - {side}_begin", end - begin)


def _bound(name: str, x: Any) -> Any:
  """Checks a static or traced integer."""
  if not isinstance(x, jax.Array):
    return check_position(name, x)
  x = as_int32(name, x, ())
  return int(x) if isinstance(x, np.ndarray) else x
