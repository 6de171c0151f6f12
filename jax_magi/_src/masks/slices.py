"""Slices as arrays: visible pairs, areas, and validity.

A slice is int32 (q_begin, q_end, k_begin, k_end, lo, hi). It makes pair (i, j) visible iff

    q_begin <= i < q_end,   k_begin <= j < k_end,   lo <= j - i <= hi.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_magi._src.arguments import MAX_LENGTH

# The value of an edge that a band does not have.
UNBOUNDED = MAX_LENGTH

# Columns of a slice.
Q_BEGIN, Q_END, K_BEGIN, K_END, LO, HI = range(6)

# The number of pairs of slices that the overlap check compares at once. This bounds its memory.
_MAX_PAIRS = 1 << 22
# The maximum number of rectangles in the search for better cuts, which takes quadratic time.
_MAX_GROUPED = 2048


def clamped(slices: Any, q_len: int, k_len: int) -> jax.Array:
  """Clips slices `[..., 6]` to the arrays, which traced slices may exceed."""
  low = np.array([0, 0, 0, 0, -UNBOUNDED, -UNBOUNDED], np.int32)
  high = np.array([q_len, q_len, k_len, k_len, UNBOUNDED, UNBOUNDED], np.int32)
  shape = (1,) * (slices.ndim - 1) + (6,)  # Ranks are not promoted.
  return jnp.clip(slices, low.reshape(shape), high.reshape(shape))


def intersected(a: Any, b: Any) -> Any:
  """The intersection of two lists `[batch or 1, num_slices, 6]`: a slice for each pair of slices.

  Pairs of slices that do not intersect become padding if they are traced, and are left out if they
  are numpy.
  """
  xp: Any = np if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else jnp
  a, b = a[:, :, None], b[:, None, :]
  is_low = np.array([column in (Q_BEGIN, K_BEGIN, LO) for column in range(6)])
  both = xp.where(is_low.reshape(1, 1, 1, 6), xp.maximum(a, b), xp.minimum(a, b))
  both = both.reshape(both.shape[0], both.shape[1] * both.shape[2], 6)
  is_empty = (
    (both[..., Q_BEGIN] >= both[..., Q_END])
    | (both[..., K_BEGIN] >= both[..., K_END])
    | (both[..., LO] > both[..., HI])
  )
  if xp is np:
    return stacked([row[~empty] for row, empty in zip(both, is_empty, strict=True)], both.shape[0])
  return jnp.where(is_empty[..., None], 0, both)


def stacked(lists: list[Any], batch: int = 1) -> Any:
  """Stacks one list of slices per batch row to `[batch, num_slices, 6]`, padded to the longest."""
  xp: Any = np if all(isinstance(x, np.ndarray) for x in lists) else jnp
  if not lists:
    return np.zeros((batch, 0, 6), np.int32)
  longest = max(len(x) for x in lists)
  return xp.stack([xp.pad(x, [(0, longest - len(x)), (0, 0)]) for x in lists])


def check_ranges(name: str, begin: np.ndarray, end: np.ndarray, length: int) -> None:
  """Raises a `ValueError` if a range is reversed, or not inside [0, length)."""
  bad = (begin < 0) | (end > length) | (begin > end)
  if bad.any():
    i = int(np.argmax(bad))
    what = "is reversed" if begin[i] > end[i] else f"is not inside [0, {length})"
    raise ValueError(f"{name}[{i}] = [{begin[i]}, {end[i]}) {what}")


def check_disjoint(slices: np.ndarray) -> None:
  """Raises a `ValueError` if two slices share a pair."""
  sizes = area_of(slices)
  index = np.flatnonzero(sizes)
  # Sort along the axis that leaves fewer pairs to compare.
  orders = [_by_begin(slices, index, *ends) for ends in ((Q_BEGIN, Q_END), (K_BEGIN, K_END))]
  order, counts = min(orders, key=lambda candidate: candidate[1].sum())
  s = slices[order].astype(np.int64)
  stops = np.cumsum(counts)
  first = 0
  while first < len(s):
    until = int(np.searchsorted(stops, stops[first] - counts[first] + _MAX_PAIRS, side="right"))
    until = max(until, first + 1)
    a = np.repeat(np.arange(first, until), counts[first:until])
    starts = np.repeat(stops[first:until] - counts[first:until], counts[first:until])
    b = a + 1 + np.arange(len(a)) + (stops[first] - counts[first]) - starts
    q_begin = np.maximum(s[a, Q_BEGIN], s[b, Q_BEGIN])
    q_end = np.minimum(s[a, Q_END], s[b, Q_END])
    k_begin = np.maximum(s[a, K_BEGIN], s[b, K_BEGIN])
    k_end = np.minimum(s[a, K_END], s[b, K_END])
    # Every j - i between the corners of the common rectangle occurs in it.
    lo = np.maximum(np.maximum(s[a, LO], s[b, LO]), k_begin - q_end + 1)
    hi = np.minimum(np.minimum(s[a, HI], s[b, HI]), k_end - 1 - q_begin)
    shared = (q_begin < q_end) & (k_begin < k_end) & (lo <= hi)
    if shared.any():
      pair = int(np.argmax(shared))
      i, j = sorted((int(order[a[pair]]), int(order[b[pair]])))
      raise ValueError(
        f"slices {i} and {j} overlap, and a pair of tokens may be covered only once: "
        f"{slices[i].tolist()} and {slices[j].tolist()} (q_begin, q_end, k_begin, k_end, lo, hi)"
      )
    first = until


def _by_begin(slices: np.ndarray, index: np.ndarray, begin: int, end: int) -> Any:
  """`index` sorted by begin along an axis, and how many successors each slice overlaps with."""
  order = index[np.argsort(slices[index, begin], kind="stable")]
  # A slice can overlap only with slices that begin before it ends.
  last = np.searchsorted(slices[order, begin], slices[order, end])
  return order, np.maximum(last - np.arange(len(order)) - 1, 0)


def area_of(slices: Any) -> Any:
  """The number of visible pairs of each slice: int64 for numpy slices, float32 for traced ones."""
  xp: Any = np if isinstance(slices, np.ndarray) else jnp
  s = slices.astype(np.int64 if xp is np else np.float32)
  height = xp.maximum(s[..., Q_END] - s[..., Q_BEGIN], 0)
  width = xp.maximum(s[..., K_END] - s[..., K_BEGIN], 0)
  corner = s[..., K_BEGIN] - s[..., Q_BEGIN]

  def triangle(n: Any) -> Any:
    n = xp.maximum(n, 0)
    return n * (n + 1) // 2

  def pairs_up_to(x: Any) -> Any:  # Pairs with j - i <= x, counted from the rectangle's corner.
    x = xp.clip(x - corner, -height, width)
    return triangle(x + height) - triangle(x) - triangle(x + height - width) + triangle(x - width)

  return xp.maximum(pairs_up_to(s[..., HI]) - pairs_up_to(s[..., LO] - 1), 0)


def grouped_by_keys(slices: np.ndarray) -> np.ndarray:
  """The same pairs, with full rectangles cut so that each key is in few of them.

  A block-causal mask has a slice for each block of queries, and a key is in many of them. With a
  slice for each block of keys, it is in one. If there would be more slices, they stay unchanged.
  """
  areas = area_of(slices)
  s, areas = slices[areas > 0], areas[areas > 0]
  heights, widths = s[:, Q_END] - s[:, Q_BEGIN], s[:, K_END] - s[:, K_BEGIN]
  is_full = areas == heights * widths.astype(np.int64)
  full = s[is_full]
  full = full[np.argsort(full[:, Q_BEGIN], kind="stable")]
  if not _has_neighbours(full):
    return slices
  groups: list[tuple[int, int, list[list[int]]]] = []  # Keys, and the ranges of queries they meet.
  for begin, end in itertools.pairwise(np.unique(full[:, [K_BEGIN, K_END]]).tolist()):
    meets = full[(full[:, K_BEGIN] <= begin) & (end <= full[:, K_END])]
    is_apart = meets[1:, Q_BEGIN] != meets[:-1, Q_END]
    firsts, lasts = np.append(True, is_apart), np.append(is_apart, True)
    ranges = (
      np.stack([meets[firsts, Q_BEGIN], meets[lasts, Q_END]], 1).tolist() if len(meets) else []
    )
    if groups and groups[-1][1:] == (begin, ranges):
      groups[-1] = (groups[-1][0], end, ranges)
    else:
      groups.append((begin, end, ranges))
  rectangles = [
    [*queries, begin, end, -UNBOUNDED, UNBOUNDED]
    for begin, end, ranges in groups
    for queries in ranges
  ]
  if len(rectangles) > len(full):
    return slices
  return np.concatenate([np.array(rectangles, np.int32), s[~is_full]])


def _has_neighbours(full: np.ndarray) -> bool:
  """Whether rectangles, sorted by query, are adjacent and share some keys."""
  begins, ends = full[:, Q_BEGIN], full[:, Q_END]
  first, last = (np.searchsorted(begins, ends, side=side) for side in ("left", "right"))
  if len(full) > _MAX_GROUPED or not (first < last).any():
    return False
  a = np.repeat(np.arange(len(full)), last - first)
  b = np.concatenate([np.arange(i, j) for i, j in zip(first, last, strict=True)])
  begin = np.maximum(full[a, K_BEGIN], full[b, K_BEGIN])
  return bool((begin < np.minimum(full[a, K_END], full[b, K_END])).any())


def visible(slices: Any, rows: Any, keys: Any) -> jax.Array:
  """bool `[rows, keys]`: whether `slices` `[n, 6]` make each pair of two int32 vectors visible."""
  s = slices[:, :, None, None]
  rows, keys = rows[None, :, None], keys[None, None, :]
  diagonal = keys - rows
  return jnp.any(
    (s[:, Q_BEGIN] <= rows)
    & (rows < s[:, Q_END])
    & (s[:, K_BEGIN] <= keys)
    & (keys < s[:, K_END])
    & (s[:, LO] <= diagonal)
    & (diagonal <= s[:, HI]),
    axis=0,
  )


def shown_queries(slices: Any, q_len: int) -> jax.Array:
  """bool `[q_len]`: whether each query sees any key under `slices` `[n, 6]`."""
  s = slices[:, :, None]
  row = jnp.arange(q_len, dtype=np.int32)[None]
  begin = jnp.maximum(s[:, K_BEGIN], row + s[:, LO])
  end = jnp.minimum(s[:, K_END], row + s[:, HI] + 1)
  return jnp.any((s[:, Q_BEGIN] <= row) & (row < s[:, Q_END]) & (begin < end), axis=0)


def shown_keys(slices: Any, k_len: int) -> jax.Array:
  """bool `[k_len]`: whether any query sees each key under `slices` `[n, 6]`."""
  s = slices[:, :, None]
  key = jnp.arange(k_len, dtype=np.int32)[None]
  begin = jnp.maximum(s[:, Q_BEGIN], key - s[:, HI])
  end = jnp.minimum(s[:, Q_END], key - s[:, LO] + 1)
  return jnp.any((s[:, K_BEGIN] <= key) & (key < s[:, K_END]) & (begin < end), axis=0)


def touches(slices: Any, q_begin: Any, q_end: Any, k_begin: Any, k_end: Any) -> jax.Array:
  """Whether `slices` make any pair of the tile [q_begin, q_end) x [k_begin, k_end) visible."""
  q_begin = jnp.maximum(slices[:, Q_BEGIN], q_begin)
  q_end = jnp.minimum(slices[:, Q_END], q_end)
  k_begin = jnp.maximum(slices[:, K_BEGIN], k_begin)
  k_end = jnp.minimum(slices[:, K_END], k_end)
  lo = jnp.maximum(slices[:, LO], k_begin - q_end + 1)
  hi = jnp.minimum(slices[:, HI], k_end - 1 - q_begin)
  return jnp.any((q_begin < q_end) & (k_begin < k_end) & (lo <= hi))
