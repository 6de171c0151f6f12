"""Finds slices that make the same pairs visible as a dense mask.

A row of a dense mask is a list of intervals of keys. In a slice, the begin of the interval is
constant over the first rows, and then advances by one key per row. The end first advances by one
key per row, and is then constant. So intervals of consecutive rows are linked into chains if each
end stays or advances by one, and a chain is cut where that order of staying and advancing breaks.
"""

from __future__ import annotations

import numpy as np

from jax_magi._src.masks.slices import UNBOUNDED

# The number of elements of the dense mask that are processed at once. This bounds the memory.
_MAX_ELEMENTS = 1 << 24


def cover(dense: np.ndarray, max_slices: int | None = None) -> np.ndarray | None:
  """int32 `[num_slices, 6]`, disjoint and not empty.

  Args:
    dense: bool `[q_len, k_len]`.
    max_slices: a limit on the number of slices. If there would be more, the result is None, and the
      function returns early.
  """
  found = _intervals(dense, max_slices)
  if found is None:
    return None
  row, begin, end = found
  if row.size == 0:
    return np.zeros((0, 6), np.int32)
  order, is_head = _chains(row, begin, end, dense.shape[1])
  row, begin, end = row[order], begin[order], end[order]
  # How each interval moved relative to the one before it in its chain.
  begin_moves, end_moves = np.append(0, np.diff(begin)), np.append(0, np.diff(end))
  first = is_head | _cuts(is_head, begin_moves, end_moves)
  if max_slices is not None and first.sum() > max_slices:
    return None
  firsts = np.flatnonzero(first)
  lasts = np.append(firsts[1:], len(row)) - 1
  moves = np.where(first, 0, begin_moves), np.where(first, 0, end_moves)
  has_lo, has_hi = (np.add.reduceat(x, firsts) > 0 for x in moves)
  lo = np.where(has_lo, begin[lasts] - row[lasts], -UNBOUNDED)
  hi = np.where(has_hi, end[firsts] - 1 - row[firsts], UNBOUNDED)
  columns = [row[firsts], row[lasts] + 1, begin[firsts], end[lasts], lo, hi]
  slices = np.stack(columns, axis=1).astype(np.int32)
  return slices[np.lexsort((slices[:, 2], slices[:, 0]))]


def _intervals(
  dense: np.ndarray, max_slices: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
  """The row, the first key and the end of each interval, in order."""
  q_len, k_len = dense.shape
  num_rows = max(_MAX_ELEMENTS // max(k_len, 1), 1)
  parts = []
  for first in range(0, q_len, num_rows):
    rows = np.pad(dense[first : first + num_rows], [(0, 0), (1, 1)])
    is_edge = rows[:, 1:] != rows[:, :-1]
    row, key = np.nonzero(is_edge)  # Begins and ends take turns.
    # The intervals of a row belong to different slices.
    if max_slices is not None and is_edge.sum(axis=1).max(initial=0) > 2 * max_slices:
      return None
    parts.append((first + row[::2], key[::2], key[1::2]))
  if not parts:
    parts = [(np.zeros(0, np.int64),) * 3]
  row, begin, end = (np.concatenate(x) for x in zip(*parts, strict=True))
  return row, begin, end


def _chains(
  row: np.ndarray, begin: np.ndarray, end: np.ndarray, k_len: int
) -> tuple[np.ndarray, np.ndarray]:
  """An order that sorts intervals by chain, and the positions in it at which a chain begins."""
  place = row * (k_len + 1) + begin
  index = np.arange(len(row))
  before = index.copy()  # The interval to which each is linked, or itself.
  for move in (0, 1):
    wanted = place + k_len + 1 + move
    found = np.minimum(np.searchsorted(place, wanted), len(row) - 1)
    grows = end[found] - end
    is_next = (place[found] == wanted) & (grows >= 0) & (grows <= 1)
    before[found[is_next]] = index[is_next]
  head = before
  while not np.array_equal(head, further := head[head]):
    head = further
  order = np.lexsort((row, head))
  return order, (before == index)[order]


def _cuts(is_head: np.ndarray, begin_moves: np.ndarray, end_moves: np.ndarray) -> np.ndarray:
  """Where a chain needs another slice: a begin stays after advancing, or an end advances again."""
  could = np.append(False, (begin_moves[1:] < begin_moves[:-1]) | (end_moves[1:] > end_moves[:-1]))
  # Moves are defined neither for the first interval of a chain nor for the first after a cut.
  could &= ~(is_head | np.append(False, is_head[:-1]))
  starts = could & ~np.append(False, could[:-1])
  since = np.arange(len(could)) - np.maximum.accumulate(np.where(starts, np.arange(len(could)), 0))
  is_cut: np.ndarray = could & (since % 2 == 0)
  return is_cut
